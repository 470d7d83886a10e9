"""Reading of a committed snapshot: all of it, or any part of a tensor, from the files of the ranks that saved it."""

import json
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast import memory
from holdfast.blocks.division import Array
from holdfast.checkpoint import digest, payload, sharding
from holdfast.checkpoint.digest import Progress, unwatched
from holdfast.checkpoint.manifest import extra_name, read_manifest, shard_name
from holdfast.checkpoint.shard_file import ShardFile
from holdfast.checkpoint.sharding import Box, Shape, ShardedTensor, overlap, sizes, within
from holdfast.checkpoint.store import Store
from holdfast.errors import Corrupt

POSITION, LAYOUT = "position", "layout"  # reserved keys of extra.json


class IncompleteSnapshot(Corrupt):
    """The files of a snapshot, as they were committed, do not hold every row of every tensor exactly once."""


class SnapshotReader:
    """A committed snapshot, whose tensors are read and verified on demand.

    `extra` has all values that are not tensors. `layout` has the dtype and shape of each tensor, and the part that each
    rank saved."""

    def __init__(self, store: Store, step: int, progress: Progress = unwatched) -> None:
        self._store, self._progress = store, progress
        self.manifest = read_manifest(store, step)
        name = extra_name(step, self.manifest.term)
        text = digest.fetch(store, name, self.manifest.extra, progress).tobytes()
        self.extra = _parse_extra(name, text, self.manifest.position)
        self.layout = _parse_layout(name, self.extra.pop(LAYOUT, None), len(self.manifest.shards))
        self._shards: dict[int, ShardFile] = {}
        self._loaded: dict[str, Array] | None = None

    @property
    def step(self) -> int:
        return self.manifest.step

    def read(self, name: str, box: Box | None = None) -> Array:
        """Return the tensor `name`, or only its part `box`.

        Only the file chunks that contain the returned values are read and verified."""
        tensor = self.layout[name]
        wanted = tensor.whole if box is None else box
        if self._loaded is not None:
            return self._loaded[name] if wanted == tensor.whole else self._loaded[name][within(wanted, tensor.whole)]
        parts = tensor.parts(wanted)
        if len(parts) == 1:
            rank, part = parts[0]
            return self._read_part(name, rank, part, wanted)
        for rank, _ in parts:
            self._shard(rank)  # raises Corrupt if the file is smaller than the layout says
        result = self._empty(name, sizes(wanted))
        for rank, part in parts:
            common = overlap(wanted, part)
            values = self._read_part(name, rank, part, common, keep=False)
            result[within(common, wanted)] = payload.as_tensor(values)
        return result

    def preload(self) -> None:
        """Read and verify the whole snapshot now, and keep it in memory for later calls of `read`."""
        self._loaded = self.read_all()

    def in_file_order(self) -> list[str]:
        """Return all tensor names in file order; reading the tensors in this order reads each chunk about once."""
        entries = self._shard(0).entries  # of all tensors: rank 0 has the first rows of each
        return sorted(self.layout, key=lambda name: entries[name].start)

    def read_all(self) -> dict[str, Array]:
        """Return all tensors. A tensor that one rank saved whole is a view of a buffer with that rank's whole file."""
        self._check_coverage()
        result: dict[str, Array] = {}
        for rank in range(len(self.manifest.shards)):
            shard = self._shard(rank)
            for name, value in payload.decode(shard.read_all(), shard.name).items():
                self._add(result, name, rank, value)
        return {name: result[name] for name in self.layout}

    def check(self) -> None:
        """Verify every byte, and that every row of every tensor was saved exactly once; raise Corrupt otherwise."""
        for rank in range(len(self.manifest.shards)):
            self._shard(rank).check()
        self._check_coverage()

    def check_rows(self) -> None:
        """Check from the headers of all files that every row of every tensor was saved exactly once.

        Raise IncompleteSnapshot if not, and Corrupt if a header is damaged. Values are not read."""
        for rank in range(len(self.manifest.shards)):
            self._open(rank)
        self._check_coverage()

    def _add(self, result: dict[str, Array], name: str, rank: int, value: Array) -> None:
        """Add `value`, which is the part of the tensor `name` that `rank` saved, to the tensor in `result`."""
        tensor = self.layout[name]
        box = tensor.box(rank)
        if box is None or box == tensor.whole:
            result[name] = value
            return
        if name not in result:
            result[name] = self._empty(name, tensor.shape)
        result[name][within(box, tensor.whole)] = payload.as_tensor(value)

    def _empty(self, name: str, shape: Shape) -> Array:
        dtype = self.layout[name].dtype
        memory.require(name, math.prod(shape) * payload.bytes_each(dtype))
        return payload.empty(dtype, shape)

    def _read_part(self, name: str, rank: int, part: Box, wanted: Box, *, keep: bool = True) -> Array:
        """Return the part `wanted` of a tensor from the file of `rank`, which has the larger part `part` of it.

        Without `keep`, the result may be valid only until the next call."""
        shard = self._shard(rank)
        entry = shard.entries[name]
        if not part:  # a number
            return payload.as_array(shard.read(entry.start, entry.end, keep=keep), entry, ())
        first, last = wanted[0][0] - part[0][0], wanted[0][1] - part[0][0]
        row = (entry.end - entry.start) // max(1, sizes(part)[0])
        data: npt.NDArray[np.uint8] = shard.read(entry.start + first * row, entry.start + last * row, keep=keep)
        rows = payload.as_array(data, entry, (last - first, *sizes(part)[1:]))
        return rows[(slice(None), *within(wanted[1:], part[1:]))]

    def _shard(self, rank: int) -> ShardFile:
        if rank not in self._shards:
            self._shards[rank] = self._open(rank)
        return self._shards[rank]

    def _open(self, rank: int) -> ShardFile:
        """Open the file of `rank`; raise IncompleteSnapshot if its tensors differ from the layout of the snapshot."""
        name = shard_name(self.step, rank, len(self.manifest.shards), self.manifest.term)
        shard = ShardFile(self._store, name, self.manifest.shards[rank], self._progress)
        self._check_entries(shard, rank)
        return shard

    def _check_entries(self, shard: ShardFile, rank: int) -> None:
        boxes = {name: tensor.box(rank) for name, tensor in self.layout.items()}
        expected = {name: (self.layout[name].dtype, list(sizes(box))) for name, box in boxes.items() if box is not None}
        actual = {name: (entry.dtype, entry.shape) for name, entry in shard.entries.items()}
        if actual != expected:
            name = min(name for name in {*actual, *expected} if actual.get(name) != expected.get(name))
            raise IncompleteSnapshot(
                f"{shard.name} does not hold the part of {name!r:.200} that rank {rank} was to save: fall back to an older "
                "snapshot."
            )

    def _check_coverage(self) -> None:
        """Raise IncompleteSnapshot unless the parts of all ranks cover every tensor exactly once."""
        for name, tensor in self.layout.items():
            covered = sum(_volume(part) for _, part in tensor.parts(tensor.whole))
            if covered != _volume(tensor.whole):
                raise IncompleteSnapshot(
                    f"{name} has {_volume(tensor.whole)} values, of which {covered} were saved: use an older one."
                )


def _volume(box: Box) -> int:
    return math.prod(sizes(box))


def _parse_layout(name: str, value: Any, count: int) -> dict[str, ShardedTensor]:
    try:
        layout = sharding.from_json(value, count)
    except Corrupt as error:
        raise IncompleteSnapshot(f"{name}: {error}") from error
    if unknown := [tensor.dtype for tensor in layout.values() if not payload.is_dtype(tensor.dtype)]:
        raise Corrupt(
            f"{name} has a tensor of dtype {unknown[0]!r:.200}, which is unknown: fall back to an older snapshot."
        )
    return layout


def _parse_extra(name: str, text: bytes, position: dict[str, Any]) -> dict[str, Any]:
    def reject(word: str) -> float:
        raise ValueError(f"{word} is not JSON")

    try:
        extra = json.loads(text, parse_constant=reject)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{name} is not JSON: fall back to an older snapshot.") from error
    if not isinstance(extra, dict):
        raise Corrupt(f"{name} is not a JSON object: fall back to an older snapshot.")
    if extra.pop(POSITION, None) != position:
        raise Corrupt(
            f"{name} and its manifest differ in step, epoch, cursor or config: one of the two files was changed."
        )
    return extra
