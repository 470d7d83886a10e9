"""The running checkpoint: the newest saved value of every block of the state, saved at different iterations.

    running/segment-<seq>-<writer>.safetensors   blocks saved together: ids, the iteration of each, values
    running/index-<generation>.json              the commit record: the current segments, each with its digest

Segments are never modified. The last two generations of the index are kept, in case the newest is damaged. A value is
dead if a newer value of its block was saved. Each save also compacts: it copies live values out of segments with many
dead bytes, or out of many small segments. If several processes hold blocks, each process writes segments, and one
process commits the index.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from holdfast.blocks.division import Array, Blocks, Family, Ids, State
from holdfast.checkpoint import digest, payload
from holdfast.checkpoint.digest import Digest
from holdfast.checkpoint.index import (
    FOLDER,
    Index,
    generations,
    index_name,
    next_sequence,
    read_index,
    segment_name,
    write_index,
)
from holdfast.checkpoint.snapshot import PassedOver
from holdfast.checkpoint.store import Store
from holdfast.errors import BadInput, CommitConflict, Corrupt, NoSnapshot

logger = logging.getLogger(__name__)

LIMIT = 1.5  # segments may hold this many times the state; with those of the previous generation, about twice
ROOM = 16 << 20  # bytes of dead values that are always tolerated, because moving live ones would cost more
MANY = 64  # segments; beyond, half of them are merged into few
PIECES = 16  # a segment holds at most 1/PIECES of the state, so that compaction moves little at once,
PIECE = 1 << 20  # or this many bytes if the state is small


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A file with the values of several blocks, and for each block its id, the iteration of its save, and its bytes."""

    name: str
    digest: Digest
    ids: Ids
    saved_at: Ids
    bytes: Ids


class RunningCheckpoint:
    """An incremental checkpoint: the state is divided into blocks, and each save writes any subset of them.

    Only one process at a time may save."""

    def __init__(self, store: Store, blocks: Blocks, writer: str) -> None:
        self.passed_over: tuple[PassedOver, ...] = ()
        self._store, self._blocks, self._writer = store, blocks, writer
        self._bytes = np.zeros(len(blocks), np.int64)
        self._segments: list[Segment] = []
        self._generation = -1  # of the newest good index
        self._next = 0  # generation of the next index
        self._sequence = next_sequence(store)

    @classmethod
    def create(cls, store: Store, blocks: Blocks, state: State, *, writer: str = "0") -> "RunningCheckpoint":
        """Create an incremental checkpoint with all blocks of `state` at iteration 0; file names contain `writer`."""
        if generations(store):
            raise CommitConflict(f"{store} already has a running checkpoint: open it, or use another store.")
        running = cls(store, blocks, writer)
        running.save(0, state, np.arange(len(blocks)))
        return running

    @classmethod
    def open(cls, store: Store, blocks: Blocks, *, writer: str = "0") -> "RunningCheckpoint":
        """Open the newest intact version of the checkpoint, and list damaged newer versions in `passed_over`."""
        numbers = generations(store)
        bad: list[PassedOver] = []
        for generation in reversed(numbers):
            running = cls(store, blocks, writer)
            try:
                running._read(read_index(store, generation))
            except (Corrupt, NoSnapshot) as error:
                logger.warning("passed over generation %d of the running checkpoint: %s", generation, error)
                bad.append(PassedOver(index_name(generation), str(error)))
                continue
            running.passed_over, running._next = tuple(bad), numbers[-1] + 1
            return running
        if bad:
            raise Corrupt(f"no generation of the running checkpoint in {store} is good: {bad[0].why}")
        raise NoSnapshot(f"{store} has no running checkpoint: create one.")

    @property
    def saved_at(self) -> Ids:
        """The iteration of the last save of each block, indexed by block id."""
        result = np.zeros(len(self._blocks), np.int64)
        for segment in self._segments:
            result[segment.ids] = segment.saved_at
        return result

    @property
    def bytes(self) -> int:
        """The total size in bytes of all files of the checkpoint."""
        return sum(segment.digest.length for segment in self._segments)

    def save(self, iteration: int, state: State, ids: Ids) -> None:
        """Save the blocks `ids` of `state` in one commit; `iteration` is recorded as the iteration of their values."""
        ids = np.asarray(ids, np.int64)
        if len(np.unique(ids)) != len(ids):
            raise BadInput("a block can be saved only once in a save: the same id was given twice.")
        if not len(ids):
            return
        self._bytes[ids] = block_bytes(self._blocks, state)[ids]
        carried, kept = self._compaction(ids, LIMIT, ROOM)
        new = self._write(ids, np.full(len(ids), iteration), self._blocks.pack(state, ids))
        self._commit([*kept, *self._carry(carried), *new])

    def reserve(self) -> int:
        """Reserve file numbers for one save by other processes, and return the first number."""
        first, self._sequence = self._sequence, self._sequence + PIECES + 1
        return first

    def commit(self, segments: Sequence[Segment]) -> None:
        """Commit files of blocks (segments) that other processes wrote; raise BadInput if two have a common block."""
        ids = np.concatenate([segment.ids for segment in segments] or [np.zeros(0, np.int64)])
        if len(np.unique(ids)) != len(ids):
            raise BadInput("a block can be saved only once in a save: two of the segments hold the same one.")
        if not len(ids):
            return
        for segment in segments:
            self._bytes[segment.ids] = segment.bytes
        carried, kept = self._compaction(ids, LIMIT, ROOM)
        self._commit([*kept, *self._carry(carried), *segments])

    def holding(self, ids: Ids) -> list[Segment]:
        """Return the files (segments) that contain the newest values of the blocks `ids`."""
        return [self._segments[i] for i in np.unique(_owners(self._blocks, self._segments)[np.asarray(ids, np.int64)])]

    def load(self, ids: Ids) -> dict[str, Array]:
        """Return the newest saved values of the blocks `ids`, in the format of `Blocks.pack`."""
        return load_blocks(self._store, self._blocks, self._segments, ids)

    def restore(self, ids: Ids, target: State) -> None:
        """Write the newest saved values of the blocks `ids` into the arrays of `target`, in place."""
        self._blocks.unpack(self.load(ids), ids, target)

    def compact(self) -> None:
        """Rewrite all files that contain outdated block values, to free disk space."""
        carried, kept = self._compaction(np.zeros(0, np.int64), 1.0, 0)
        if len(kept) < len(self._segments):
            self._commit([*kept, *self._carry(carried)])

    def _read(self, index: Index) -> None:
        if index.layout != _fingerprint(self._blocks):
            raise BadInput(f"the running checkpoint in {self._store} has other blocks: open it with the same ones.")
        missing = np.ones(len(self._blocks), bool)
        for name, expected in index.segments.items():
            ids, saved_at, values = _open_segment(self._store, name, expected)
            try:
                layout, positions = packed_blocks(self._blocks, ids)
                for family in layout.families:
                    for shape in (values[member].shape for member in family.members):
                        if family.dim is not None and (
                            len(shape) <= family.dim or shape[family.dim] != family.bounds[-1]
                        ):
                            raise ValueError(f"a value of {family.array} has a shape of {tuple(shape)}")
                sizes = block_bytes(layout, values)[positions]
                self._bytes[ids] = sizes
                missing[ids] = False
            except (IndexError, KeyError, ValueError) as error:
                raise Corrupt(f"{name} does not hold the blocks it names: {str(error)!r:.200}.") from error
            self._segments.append(Segment(name, expected, ids, saved_at, sizes))
        if missing.any():
            raise Corrupt(f"{index_name(index.generation)} has no value for block {int(missing.argmax())}.")
        self._generation = index.generation

    def _compaction(self, incoming: Ids, limit: float, room: int) -> tuple[Ids, list[Segment]]:
        """Return the blocks that the next save must rewrite to free disk space, and the files (segments) to keep.

        The next save writes the blocks `incoming`. The files together may have `limit` times the size of the state, or
        the size of the state plus `room` bytes if that is more."""
        owner = _owners(self._blocks, self._segments)
        owner[incoming] = -1
        alive = [segment.ids[owner[segment.ids] == i] for i, segment in enumerate(self._segments)]
        held = np.array([self._bytes[s.ids].sum() for s in self._segments], np.int64)
        live = np.array([self._bytes[ids].sum() for ids in alive], np.int64)
        total, state = held.sum() + self._bytes[incoming].sum(), self._bytes.sum()
        most = max(limit * state, state + room)
        count = len(held) if len(held) <= MANY else MANY // 2
        # Segments with the smallest share of live bytes first: they free the most bytes for each byte moved.
        order = np.argsort(live / np.maximum(held, 1), kind="stable")
        victims: set[int] = set()
        for i in order:
            frees = total > most and live[i] < held[i]
            if len(alive[i]) and not frees and len(held) - len(victims) <= count:
                continue
            victims.add(i)
            total -= held[i] - live[i]
        carried = np.concatenate([alive[i] for i in sorted(victims)] or [np.zeros(0, np.int64)])
        return carried, [segment for i, segment in enumerate(self._segments) if i not in victims]

    def _carry(self, ids: Ids) -> list[Segment]:
        return self._write(ids, self.saved_at[ids], self.load(ids)) if len(ids) else []

    def _write(self, ids: Ids, saved_at: Ids, packed: State) -> list[Segment]:
        total = int(self._bytes.sum())
        written = write_segments(self._store, self._blocks, self._writer, self._sequence, ids, saved_at, packed, total)
        self._sequence += len(written)
        return written

    def _commit(self, segments: list[Segment]) -> None:
        previous, before = self._generation, {segment.name for segment in self._segments}
        ages = np.zeros(len(self._blocks), np.int64)
        for segment in segments:
            ages[segment.ids] = segment.saved_at
        index = Index(
            generation=self._next,
            blocks=len(self._blocks),
            layout=_fingerprint(self._blocks),
            oldest=int(ages.min(initial=ages.max(initial=0))),
            newest=int(ages.max(initial=0)),
            segments={segment.name: segment.digest for segment in segments},
        )
        write_index(self._store, index)  # the commit point
        self._segments, self._generation, self._next = segments, index.generation, index.generation + 1
        # Remove what neither this generation nor the one before needs; indexes first, because they name segments.
        keep = before | set(index.segments) | {index_name(previous), index_name(index.generation)}
        self._store.sweep(FOLDER)
        for name in self._store.names(FOLDER):  # "index-" sorts before "segment-"
            if name not in keep:
                self._store.remove(name)


def write_segments(
    store: Store, blocks: Blocks, writer: str, sequence: int, ids: Ids, saved_at: Ids, packed: State, total: int
) -> list[Segment]:
    """Write the blocks `ids` to new files (segments), which must then be committed, and return the segments.

    `packed` has the values, as returned by `Blocks.pack`, `saved_at` the iteration of each block, and `total` is the
    size of the whole state in bytes. File names contain `writer` and numbers from `sequence` on."""
    layout, positions = packed_blocks(blocks, ids)
    sizes = block_bytes(layout, packed)[positions]
    piece = np.cumsum(sizes) // max(total // PIECES, PIECE)
    written: list[Segment] = []
    for number in np.unique(piece):
        part = piece == number
        values = {f"state/{k}": v for k, v in layout.pack(packed, positions[part]).items()}
        name = segment_name(sequence + len(written), writer)
        parts = payload.encode({"ids": ids[part], "saved_at": saved_at[part], **values})
        written.append(Segment(name, digest.put(store, name, parts), ids[part], saved_at[part], sizes[part]))
    return written


def load_blocks(store: Store, blocks: Blocks, segments: Sequence[Segment], ids: Ids) -> dict[str, Array]:
    """Return the blocks `ids` in the format of `Blocks.pack`, each from the last of the `segments` that contains it."""
    ids = np.asarray(ids, np.int64)
    target: dict[str, Array] = {}
    layout, places = packed_blocks(blocks, ids)
    owner = _owners(blocks, segments)[ids]
    for i in np.unique(owner):
        segment, wanted = segments[i], owner == i
        values = _open_segment(store, segment.name, segment.digest)[2]
        source, positions = packed_blocks(blocks, segment.ids)
        where = np.full(len(blocks), -1)
        where[segment.ids] = positions
        chosen = source.pack(values, where[ids[wanted]])
        for name in chosen.keys() - target.keys():
            target[name] = _empty(layout, name, chosen[name])
        layout.unpack(chosen, places[wanted], target)
    return target


def _owners(blocks: Blocks, segments: Sequence[Segment]) -> Ids:
    owner = np.zeros(len(blocks), np.int64)
    for i, segment in enumerate(segments):
        owner[segment.ids] = i
    return owner


def _open_segment(store: Store, name: str, expected: Digest) -> tuple[Ids, Ids, dict[str, Array]]:
    tensors = payload.decode(digest.fetch(store, name, expected), name)
    try:
        ids, saved_at = tensors.pop("ids"), tensors.pop("saved_at")
    except KeyError as error:
        raise Corrupt(f"{name} lacks its {error}: fall back to an older snapshot.") from error
    if not (_is_numbers(ids) and _is_numbers(saved_at) and ids.shape == saved_at.shape):
        raise Corrupt(f"{name} does not name its blocks by number.")
    if len(np.unique(ids)) != len(ids):
        raise Corrupt(f"{name} names a block twice.")
    values = {key.removeprefix("state/"): value for key, value in tensors.items()}
    return np.asarray(ids), np.asarray(saved_at), values


def _is_numbers(value: Array) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.int64 and value.ndim == 1 and value.min(initial=0) >= 0


def packed_blocks(blocks: Blocks, ids: Ids) -> tuple[Blocks, Ids]:
    """Return the layout of the result of `blocks.pack(state, ids)`, and the number that each block has in it."""
    families, numbers, first, count = [], np.empty(len(ids), np.int64), 0, 0
    for family in blocks.families:
        mine = (first <= ids) & (ids < first + len(family))
        own = ids[mine] - first
        lengths = family.bounds[own + 1] - family.bounds[own]
        numbers[mine] = count + np.arange(len(lengths))
        first, count = first + len(family), count + len(lengths)
        if len(lengths):
            bounds = np.concatenate(([0], np.cumsum(lengths)))
            families.append(Family(family.array, family.dim, bounds, family.row_size, family.companions))
    return Blocks(tuple(families)), numbers


def block_bytes(blocks: Blocks, state: State) -> Ids:
    """Return the size of each block in bytes, including its optimizer state."""
    parts = [np.zeros(0, np.int64)]
    for family in blocks.families:
        lengths = np.diff(family.bounds)
        row = sum(int(state[name].nbytes) // max(int(family.bounds[-1]), 1) for name in family.members)
        parts.append(lengths * row)
    return np.concatenate(parts)


def _empty(blocks: Blocks, name: str, like: Array) -> Array:
    family = next(family for family in blocks.families if name in family.members)
    shape = list(like.shape)
    if family.dim is not None:
        shape[family.dim] = int(family.bounds[-1])
    return np.empty(shape, like.dtype) if isinstance(like, np.ndarray) else like.new_empty(shape)


def _fingerprint(blocks: Blocks) -> str:
    hasher = xxhash.xxh3_128()
    for family in blocks.families:
        hasher.update(repr((family.members, family.dim, family.row_size)).encode())
        hasher.update(np.ascontiguousarray(family.bounds, np.int64).data)
    return str(hasher.hexdigest())
