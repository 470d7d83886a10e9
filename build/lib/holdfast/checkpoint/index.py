"""The index, the commit record of a running checkpoint: the names and digests of its segment files.

A running checkpoint holds the newest saved value of each block of the state; each commit is a new generation.
"""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from holdfast.checkpoint.digest import Digest, is_count, seal, unseal
from holdfast.checkpoint.store import SMALL, Store, read
from holdfast.errors import BadInput, Corrupt, NoSnapshot

FOLDER = "running/"
# [0-9] instead of \d, which also matches the digits of other scripts.
_INDEX = re.compile(r"running/index-([0-9]{8,18})\.json")
_SEGMENT = re.compile(r"running/segment-([0-9]{8,18})-[\w.-]+\.safetensors")


@dataclass(frozen=True, slots=True)
class Index:
    """The commit record of one version (`generation`) of an incremental checkpoint, which is saved in blocks.

    `blocks` is the number of blocks, and `layout` a digest of their boundaries. `oldest` and `newest` are the lowest
    and highest iteration of a saved block. `segments` maps each file of blocks to its digest."""

    generation: int
    blocks: int
    layout: str
    oldest: int
    newest: int
    segments: dict[str, Digest]

    def __post_init__(self) -> None:
        counts = (self.generation, self.blocks, self.oldest, self.newest)
        if not (all(map(is_count, counts)) and isinstance(self.layout, str)):  # an untrusted index has any value
            raise TypeError("an index is made of counts and a layout")

    @property
    def bytes(self) -> int:
        return sum(expected.length for expected in self.segments.values())


def generations(store: Store) -> list[int]:
    """Return the version numbers of the incremental checkpoint in the store, in ascending order."""
    return sorted(int(match[1]) for match in _matches(_INDEX, store) if index_name(int(match[1])) == match[0])


def strange_indexes(store: Store) -> list[str]:
    """Return the names in the store that look like commit records of an incremental checkpoint but are invalid."""
    known = {index_name(generation) for generation in generations(store)}
    within = (name for name in store.names(f"{FOLDER}index-") if name not in known)
    return [*(name for name in store.names(FOLDER.rstrip("/")) if name == FOLDER.rstrip("/")), *within]


def read_index(store: Store, generation: int) -> Index:
    """Return the commit record of version `generation`; raise NoSnapshot if it is missing, Corrupt if it is damaged."""
    name = index_name(generation)
    try:
        record = unseal(read(store, name), name)
    except FileNotFoundError as error:
        raise NoSnapshot(f"{store} has no generation {generation} of a running checkpoint.") from error
    try:
        del record["format"]
        # A list, because the order of the segments decides which value of a block is the newest.
        entries = record.pop("segments")
        segments = {entry.pop("name"): Digest(**entry) for entry in entries}
        if not isinstance(entries, list) or len(segments) < len(entries):
            raise TypeError("segments are a list in which each counts once")
        index = Index(segments=segments, **record)
    except (KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{name} is not a valid index: {str(error)!r:.200}.") from error
    if index.generation != generation or not all(_SEGMENT.fullmatch(name) for name in segments):
        raise Corrupt(f"{name} is the index of something else: fall back to an older snapshot.")
    return index


def index_name(generation: int) -> str:
    return f"{FOLDER}index-{generation:08d}.json"


def write_index(store: Store, index: Index) -> None:
    """Commit a version of an incremental checkpoint by writing its record `index` to the store."""
    segments = [{"name": name, **asdict(expected)} for name, expected in index.segments.items()]
    record = seal({**asdict(index), "segments": segments})
    if len(record) > SMALL:
        raise BadInput(f"a running checkpoint cannot have {len(index.segments)} segments: save more blocks at once.")
    store.create(index_name(index.generation), [record])


def segment_name(sequence: int, writer: str) -> str:
    return f"{FOLDER}segment-{sequence:08d}-{writer}.safetensors"


def next_sequence(store: Store) -> int:
    """Return the lowest number that is higher than the numbers of all segments (files of blocks) in the store."""
    return 1 + max((int(match[1]) for match in _matches(_SEGMENT, store)), default=-1)


def _matches(pattern: re.Pattern[str], store: Store) -> Iterable[re.Match[str]]:
    return filter(None, map(pattern.fullmatch, store.names(FOLDER)))
