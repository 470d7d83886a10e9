"""Commit records of snapshots, and the names of a snapshot's files. A snapshot exists if and only if it has a manifest.

step-00000050/shard-00000-of-00004.safetensors   the part of the tensors that rank 0 of 4 saved
step-00000050/extra.json                         everything else
step-00000050/manifest.json                      the commit record, written last
latest.json                                      a hint for people; readers do not need it
"""

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from holdfast.checkpoint.digest import Digest, is_count, seal, unseal
from holdfast.checkpoint.store import SMALL, Store, read
from holdfast.errors import Corrupt, NoSnapshot

LATEST = "latest.json"
AT_ONCE = 16  # files that are removed at the same time
STEP = "step-"
EXTRA_LIMIT = 256 << 20  # bytes: enough for the generators of 10,000 ranks or the names of a million tensors
LAST_TIME = 253_402_214_400  # the last day of the year 9999, the last that datetime supports
_EXTRA, _MANIFEST = "extra.json", "manifest.json"
# [0-9] instead of \d, which also matches the digits of other scripts.
_NAME = re.compile(r"step-([0-9]{8,18})(?:/(.+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The commit record of a snapshot: its position in training, and a digest of each of its files.

    `shards` has the digest of each rank's tensor file, and `extra` is the digest of the file with everything else."""

    step: int
    epoch: int
    cursor: int
    world: int
    config: str
    saved: float
    shards: tuple[Digest, ...]
    extra: Digest

    def __post_init__(self) -> None:
        counts = (self.step, self.epoch, self.cursor, self.world)
        dated = type(self.saved) in (int, float) and 0 <= self.saved < LAST_TIME
        # An untrusted file has any value.
        if not (all(map(is_count, counts)) and isinstance(self.config, str) and dated and self.shards):
            raise TypeError("a manifest is made of counts, a config, a time and digests")

    @property
    def position(self) -> dict[str, Any]:
        """The position in training: step, epoch, cursor, world size and config.

        The position is also stored in extra.json, so that a changed manifest is detected."""
        return {name: getattr(self, name) for name in ("step", "epoch", "cursor", "world", "config")}

    @property
    def files(self) -> dict[str, Digest]:
        """The digests of all files of the snapshot except the manifest, by name."""
        shards = {shard_name(self.step, rank, len(self.shards)): shard for rank, shard in enumerate(self.shards)}
        return {**shards, extra_name(self.step): self.extra}

    @property
    def bytes(self) -> int:
        return sum(shard.length for shard in self.shards) + self.extra.length

    @property
    def tensors(self) -> str:
        """A hexadecimal digest of all tensor files together."""
        return str(xxhash.xxh3_128_hexdigest(" ".join(shard.xxh3 for shard in self.shards).encode()))


def encoded(manifest: Manifest) -> bytes:
    """Return the sealed JSON of a manifest."""
    pairs = [[shard.length, shard.xxh3] for shard in manifest.shards]
    return seal({**asdict(manifest), "shards": pairs})


def shard_name(step: int, rank: int, count: int) -> str:
    """Return the name of the tensor file that `rank`, one of `count` ranks, saves at `step`."""
    return file_name(step, f"shard-{rank:05d}-of-{count:05d}.safetensors")


def extra_name(step: int) -> str:
    return file_name(step, _EXTRA)


def manifest_name(step: int) -> str:
    return file_name(step, _MANIFEST)


def folder(step: int) -> str:
    return file_name(step).rstrip("/")


def file_name(step: int, part: str = "") -> str:
    return f"{STEP}{step:08d}/{part}"


def read_manifest(store: Store, step: int) -> Manifest:
    """Read and validate the commit record of a step; raise NoSnapshot if it is missing, or Corrupt if it is damaged."""
    name = manifest_name(step)
    try:
        data = read(store, name, SMALL)
    except FileNotFoundError as error:
        raise NoSnapshot(f"{store} has no snapshot of step {step}: it has {steps(store) or 'none'}.") from error
    record = unseal(data, name)
    try:
        del record["format"]
        manifest = _decoded(record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt(f"{name} is not a valid manifest: {str(error)!r:.200}.") from error
    if manifest.step != step:
        raise Corrupt(f"{name} is the manifest of another snapshot: fall back to an older one.")
    if manifest.extra.length > EXTRA_LIMIT:
        length = manifest.extra.length
        raise Corrupt(f"{name} has an extra of {length} bytes, more than {EXTRA_LIMIT}: fall back to an older one.")
    return manifest


def _decoded(record: Mapping[str, Any]) -> Manifest:
    shards = tuple(Digest(length, xxh3) for length, xxh3 in record["shards"])
    return Manifest(**{**record, "shards": shards, "extra": Digest(**record["extra"])})


def steps(store: Store) -> list[int]:
    """Return the steps that have a committed snapshot, damaged or not, in ascending order."""
    return sorted(step for step, part in files(store) if part == _MANIFEST)


def steps_in_use(store: Store) -> list[int]:
    """Return the steps that have a committed snapshot, or a folder that cannot be listed, in ascending order."""
    return sorted({step for step, part in files(store) if part in (None, _MANIFEST)})


def files(store: Store) -> Iterator[tuple[int, str | None]]:
    """Yield (step, file name) for each file of a snapshot; the name is None for a folder that cannot be listed."""
    for name in store.names(STEP):
        match = _NAME.fullmatch(name)
        if match and match[1] == f"{int(match[1]):08d}":  # without additional zeros
            yield int(match[1]), match[2]


def strange(store: Store) -> list[str]:
    """Return the top-level names in the store that look like a snapshot folder but are invalid."""
    known = {file_name(step) for step, part in files(store) if part}
    tops = dict.fromkeys(f"{name.split('/')[0]}/" for name in store.names(STEP))
    return [top.rstrip("/") for top in tops if top not in known]


def missing(store: Store, manifest: Manifest) -> list[str]:
    """Return the names of the files of a committed snapshot that are missing from the store."""
    listed = set(store.names(file_name(manifest.step)))
    return [name for name in (*manifest.files, manifest_name(manifest.step)) if name not in listed]


def remove(store: Store, step: int) -> None:
    """Remove the snapshot of a step, its manifest first; after an error, the call can be repeated."""
    store.remove(manifest_name(step))  # first: from here on the snapshot does not exist
    names = store.names(file_name(step))
    if len(names) <= AT_ONCE:
        for name in names:
            store.remove(name)
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:  # with thousands of ranks, one request after another takes minutes
        for _ in pool.map(store.remove, names):
            pass


def clear_uncommitted(store: Store, before: int | None = None) -> None:
    """Remove the files of uncommitted snapshots, which have no manifest.

    With `before`, only files of steps below it are removed. No rank may be writing a file of these steps."""
    listed, cleared = list(files(store)), set()  # one list: a snapshot may be committed between two
    committed = {step for step, part in listed if part == _MANIFEST}
    for step, part in listed:
        if part and step not in committed and (before is None or step < before):
            store.remove(file_name(step, part))
            cleared.add(step)
    for step in cleared:
        store.sweep(file_name(step))  # a rank that was killed may have left half a file
