"""The commit record of a running checkpoint: which segments count, and what their bytes must be."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.checkpoint.digest import Digest
from holdfast.checkpoint.sealed import is_count, seal, unseal
from holdfast.checkpoint.store import SMALL, Store, read
from holdfast.errors import BadInput, Corrupt, NoSnapshot

FOLDER = "running/"
# Digits of 0 to 9: `\d` is also those of every other script, and such a name is not one that we give.
_INDEX = re.compile(r"running/index-([0-9]{8,18})\.json")
_SEGMENT = re.compile(r"running/segment-([0-9]{8,18})-[\w.-]+\.safetensors")


@dataclass(frozen=True, slots=True)
class Index:
    """The commit record of a running checkpoint: one generation of it."""

    generation: int
    blocks: int
    layout: str
    oldest: int
    newest: int
    segments: dict[str, Digest]

    def __post_init__(self) -> None:
        counts = (self.generation, self.blocks, self.oldest, self.newest)
        if not (all(map(is_count, counts)) and isinstance(self.layout, str)):  # a stranger's index may say anything
            raise TypeError("an index is made of counts and a layout")

    @property
    def bytes(self) -> int:
        """How large the segments are together."""
        return sum(expected.length for expected in self.segments.values())


def generations(store: Store) -> list[int]:
    """The generations of the running checkpoint in a store, in order; none where there is no such checkpoint."""
    numbers = (int(match[1]) for match in _matches(_INDEX, store) if index_name(int(match[1])) == match[0])
    return sorted(numbers)


def strange_indexes(store: Store) -> list[str]:
    """Names that look like an index's and are none that we give, or what stands where the folder should be."""
    known = {index_name(generation) for generation in generations(store)}
    within = (name for name in store.names(f"{FOLDER}index-") if name not in known)
    return [*(name for name in store.names(FOLDER.rstrip("/")) if name == FOLDER.rstrip("/")), *within]


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
        entries = record.pop("segments")
        segments = {entry.pop("name"): Digest(**entry) for entry in entries}
        if not isinstance(entries, list) or len(segments) < len(entries):
            raise TypeError("segments are a list in which each counts once")
        index = Index(segments=segments, **record)
    except (KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{name} lacks what an index must say: {str(error)!r:.200}") from error
    if index.generation != generation or not all(_SEGMENT.fullmatch(name) for name in segments):
        raise Corrupt(f"{name} is the index of something else: fall back to an older save")
    return index


def index_name(generation: int) -> str:
    """Where a generation's commit record is stored."""
    return f"{FOLDER}index-{generation:08d}.json"


def write_index(store: Store, index: Index) -> None:
    """Commit a generation."""
    record = seal(_record(index))
    if len(record) > SMALL:
        raise BadInput(f"a running checkpoint of {len(index.segments)} segments is too many: save more blocks at once")
    store.create(index_name(index.generation), [record])


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
