"""The commit record of a running checkpoint: which segments count, and what their bytes must be."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.checkpoint.digest import Digest
from holdfast.checkpoint.sealed import seal, unseal
from holdfast.checkpoint.store import Store, read
from holdfast.errors import Corrupt, NoSnapshot

FOLDER = "running/"
_INDEX = re.compile(r"running/index-(\d{8,})\.json")
_SEGMENT = re.compile(r"running/segment-(\d{8,})-[\w.-]+\.safetensors")


@dataclass(frozen=True, slots=True)
class Index:
    """The commit record of a running checkpoint: one generation of it."""

    generation: int
    blocks: int
    layout: str
    oldest: int
    newest: int
    segments: dict[str, Digest]

    @property
    def bytes(self) -> int:
        """How large the segments are together."""
        return sum(expected.length for expected in self.segments.values())


def generations(store: Store) -> list[int]:
    """The generations of the running checkpoint in a store, in order; none where there is no such checkpoint."""
    return sorted(int(match[1]) for match in _matches(_INDEX, store))


def read_index(store: Store, generation: int) -> Index:
    """The commit record of a generation."""
    name = index_name(generation)
    try:
        record = unseal(read(store, name), name)
    except FileNotFoundError as error:
        raise NoSnapshot(f"{store} has no generation {generation} of a running checkpoint") from error
    try:
        del record["format"]
        # A list, since the order of the segments says which value of a block is the newest.
        segments = {entry.pop("name"): Digest(**entry) for entry in record.pop("segments")}
        index = Index(segments=segments, **record)
    except (KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{name} lacks what an index must say: {error}") from error
    if index.generation != generation or not all(_SEGMENT.fullmatch(name) for name in segments):
        raise Corrupt(f"{name} is the index of something else: fall back to an older save")
    return index


def index_name(generation: int) -> str:
    """Where a generation's commit record is stored."""
    return f"{FOLDER}index-{generation:08d}.json"


def write_index(store: Store, index: Index) -> None:
    """Commit a generation."""
    store.create(index_name(index.generation), [seal(_record(index))])


def segment_name(sequence: int, writer: str) -> str:
    """Where a segment is stored; sequence numbers are never used twice."""
    return f"{FOLDER}segment-{sequence:08d}-{writer}.safetensors"


def next_sequence(store: Store) -> int:
    """A sequence number above that of every segment, whether it counts or not."""
    return 1 + max((int(match[1]) for match in _matches(_SEGMENT, store)), default=-1)


def _record(index: Index) -> dict[str, Any]:
    segments = [{"name": name, **asdict(expected)} for name, expected in index.segments.items()]
    return {**asdict(index), "segments": segments}


def _matches(pattern: re.Pattern[str], store: Store) -> Iterable[re.Match[str]]:
    return filter(None, map(pattern.fullmatch, store.names(FOLDER)))
