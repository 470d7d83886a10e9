"""The running checkpoint: the newest saved value of every block, of mixed ages.

    running/segment-<seq>-<writer>.safetensors   blocks saved together: ids, the iteration of each, values
    running/index-<generation>.json              the commit record: the segments that count, each with its digest

Segments never change. Two generations of the index stay, so that damage to the newest falls back to the one before.
Compaction is part of saving: blocks that still count are carried out of the segments that hold the most dead bytes, once
these are worth the work, or out of many small segments into few.

Where blocks are held by several processes, each writes segments of its own and one of them commits the index.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.blocks.division import Array, Blocks, Ids, State
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
from holdfast.checkpoint.packed import block_bytes, empty, fingerprint, packed_blocks
from holdfast.checkpoint.snapshot import PassedOver
from holdfast.checkpoint.store import Store
from holdfast.errors import BadInput, CommitConflict, Corrupt, NoSnapshot

logger = logging.getLogger(__name__)

LIMIT = 1.5  # segments may hold this many times the state; with what the previous generation needs, about twice
ROOM = 16 << 20  # bytes that values which no longer count may take in any case: to carry others away would cost more
MANY = 64  # segments: beyond it the half of them is carried into few
PIECES = 16  # a segment holds at most this share of the state, so that compaction never has to move much at once,
PIECE = 1 << 20  # or so many bytes, where the state is small


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Blocks that were saved together: where, of which iterations, and how many bytes each takes."""

    name: str
    digest: Digest
    ids: Ids
    saved_at: Ids
    bytes: Ids


class RunningCheckpoint:
    """A running checkpoint that is open for saving and restoring; one process at a time has it open for saving."""

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
        """Start a running checkpoint with every block as it is at iteration 0."""
        if generations(store):
            raise CommitConflict(f"{store} already has a running checkpoint: open it, or use a store of its own")
        running = cls(store, blocks, writer)
        running.save(0, state, np.arange(len(blocks)))
        return running

    @classmethod
    def open(cls, store: Store, blocks: Blocks, *, writer: str = "0") -> "RunningCheckpoint":
        """The newest good generation, every segment verified; `passed_over` names a newer one that is damaged."""
        found = generations(store)
        bad: list[PassedOver] = []
        for generation in reversed(found):
            running = cls(store, blocks, writer)
            try:
                running._read(read_index(store, generation))
            except (Corrupt, NoSnapshot) as error:
                logger.warning("passed over generation %d of the running checkpoint: %s", generation, error)
                bad.append(PassedOver(index_name(generation), str(error)))
                continue
            running.passed_over, running._next = tuple(bad), found[-1] + 1
            return running
        if bad:
            raise Corrupt(f"no generation of the running checkpoint in {store} is good: {bad[0].why}")
        raise NoSnapshot(f"{store} has no running checkpoint: create one")

    @property
    def saved_at(self) -> Ids:
        """The iteration at which each block was last saved."""
        result = np.zeros(len(self._blocks), np.int64)
        for segment in self._segments:
            result[segment.ids] = segment.saved_at
        return result

    @property
    def bytes(self) -> int:
        """How large the segments are together."""
        return sum(segment.digest.length for segment in self._segments)

    def save(self, iteration: int, state: State, ids: Ids) -> None:
        """Commit these blocks of a state as the newest saved values; all of them or, if killed, none."""
        ids = np.asarray(ids, np.int64)
        if len(np.unique(ids)) != len(ids):
            raise BadInput("a block can be saved only once in a save: the same id was given twice")
        if not len(ids):
            return
        self._bytes[ids] = block_bytes(self._blocks, state)[ids]
        carried, kept = self._compaction(ids, LIMIT, ROOM)
        new = self._write(ids, np.full(len(ids), iteration), self._blocks.pack(state, ids))
        self._commit([*kept, *self._carry(carried), *new])

    def reserve(self) -> int:
        """A sequence number from which on each of several writers may number the segments of one save."""
        first, self._sequence = self._sequence, self._sequence + PIECES + 1
        return first

    def commit(self, segments: Sequence[Segment]) -> None:
        """Make segments that others have written, no block in two of them, the newest saved values of their blocks."""
        ids = np.concatenate([segment.ids for segment in segments] or [np.zeros(0, np.int64)])
        if len(np.unique(ids)) != len(ids):
            raise BadInput("a block can be saved only once in a save: two of the segments hold the same one")
        if not len(ids):
            return
        for segment in segments:
            self._bytes[segment.ids] = segment.bytes
        carried, kept = self._compaction(ids, LIMIT, ROOM)
        self._commit([*kept, *self._carry(carried), *segments])

    def holding(self, ids: Ids) -> list[Segment]:
        """The segments with the newest saved values of these blocks, for `load_blocks` in another process."""
        return [self._segments[i] for i in np.unique(self._owners()[np.asarray(ids, np.int64)])]

    def load(self, ids: Ids) -> dict[str, Array]:
        """The newest saved values of these blocks, packed as `Blocks.pack` does."""
        return load_blocks(self._store, self._blocks, self._segments, ids)

    def restore(self, ids: Ids, target: State) -> None:
        """Put the newest saved values of these blocks into a state, in place."""
        self._blocks.unpack(self.load(ids), ids, target)

    def compact(self) -> None:
        """Rewrite every segment that holds dead values."""
        carried, kept = self._compaction(np.zeros(0, np.int64), 1.0, 0)
        if len(kept) < len(self._segments):
            self._commit([*kept, *self._carry(carried)])

    def _read(self, index: Index) -> None:
        if index.layout != fingerprint(self._blocks):
            raise BadInput(f"the running checkpoint in {self._store} was made for other blocks: open it with the same")
        missing = np.ones(len(self._blocks), bool)
        for name, expected in index.segments.items():
            ids, saved_at, values = _open_segment(self._store, name, expected)
            try:
                layout, positions = packed_blocks(self._blocks, ids)
                _require_fit(layout, values)
                sizes = block_bytes(layout, values)[positions]
                self._bytes[ids] = sizes
                missing[ids] = False
            except (IndexError, KeyError, ValueError) as error:
                raise Corrupt(f"{name} does not hold the blocks it names: {str(error)!r:.200}") from error
            self._segments.append(Segment(name, expected, ids, saved_at, sizes))
        if missing.any():
            raise Corrupt(f"{index_name(index.generation)} has no value for block {int(missing.argmax())}")
        self._generation = index.generation

    def _owners(self) -> Ids:
        return _owners(self._blocks, self._segments)

    def _compaction(self, incoming: Ids, limit: float, room: int) -> tuple[Ids, list[Segment]]:
        """The blocks to carry into new segments and the segments to keep, so that all fit the limit and are not too many."""
        owner = self._owners()
        owner[incoming] = -1
        alive = [segment.ids[owner[segment.ids] == i] for i, segment in enumerate(self._segments)]
        held = np.array([self._bytes[s.ids].sum() for s in self._segments], np.int64)
        live = np.array([self._bytes[ids].sum() for ids in alive], np.int64)
        total, state = held.sum() + self._bytes[incoming].sum(), self._bytes.sum()
        most = max(limit * state, state + room)
        count = len(held) if len(held) <= MANY else MANY // 2
        # Segments with the smallest share of live bytes first: they free the most for what has to be moved.
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
            layout=fingerprint(self._blocks),
            oldest=int(ages.min(initial=ages.max(initial=0))),
            newest=int(ages.max(initial=0)),
            segments={segment.name: segment.digest for segment in segments},
        )
        write_index(self._store, index)  # the commit point
        self._segments, self._generation, self._next = segments, index.generation, index.generation + 1
        keep = before | set(index.segments) | {index_name(previous), index_name(index.generation)}
        self._clear(keep)

    def _clear(self, keep: set[str]) -> None:
        """Remove what neither this generation nor the one before needs; indexes first, as they name segments."""
        self._store.sweep(FOLDER)
        for name in self._store.names(FOLDER):  # "index-" sorts before "segment-"
            if name not in keep:
                self._store.remove(name)


def write_segments(
    store: Store, blocks: Blocks, writer: str, sequence: int, ids: Ids, saved_at: Ids, packed: State, total: int
) -> list[Segment]:
    """Write packed blocks into as many segments as their share of the `total` bytes of a state asks for.

    They are named by the writer and by sequence numbers from `sequence` on, and count once an index names them.
    """
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
    """The values of these blocks in the last of the segments that holds each, packed as `Blocks.pack` does."""
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
            target[name] = empty(layout, name, chosen[name])
        layout.unpack(chosen, places[wanted], target)
    return target


def _owners(blocks: Blocks, segments: Sequence[Segment]) -> Ids:
    """Which segment holds the newest value of each block."""
    owner = np.zeros(len(blocks), np.int64)
    for i, segment in enumerate(segments):
        owner[segment.ids] = i
    return owner


def _open_segment(store: Store, name: str, expected: Digest) -> tuple[Ids, Ids, dict[str, Array]]:
    tensors = payload.decode(digest.fetch(store, name, expected), name)
    try:
        ids, saved_at = tensors.pop("ids"), tensors.pop("saved_at")
    except KeyError as error:
        raise Corrupt(f"{name} lacks its {error}: fall back to an older save") from error
    if not (_is_numbers(ids) and _is_numbers(saved_at) and ids.shape == saved_at.shape):
        raise Corrupt(f"{name} names blocks by something else than their numbers")
    if len(np.unique(ids)) != len(ids):
        raise Corrupt(f"{name} names a block twice")
    values = {key.removeprefix("state/"): value for key, value in tensors.items()}
    return np.asarray(ids), np.asarray(saved_at), values


def _is_numbers(value: Array) -> bool:
    """Whether these are what `_write` stores of blocks: a row of counts."""
    return isinstance(value, np.ndarray) and value.dtype == np.int64 and value.ndim == 1 and value.min(initial=0) >= 0


def _require_fit(layout: Blocks, values: State) -> None:
    for family in layout.families:
        for member in family.members:
            shape = values[member].shape
            if family.dim is not None and (len(shape) <= family.dim or shape[family.dim] != family.bounds[-1]):
                raise ValueError(f"{member} has a shape of {tuple(shape)}")
