"""Commit records of snapshots, and the names of a snapshot's files. A snapshot exists if and only if it has a manifest.

step-00000050/shard-00000-of-00004.safetensors   the part of the tensors that rank 0 of 4 saved
step-00000050/extra.json                         everything else
step-00000050/manifest.json                      the commit record, written last
step-00000050-term-00000002/...                  the same, saved by the nodes that continued as term 2
latest.json                                      a hint for people; readers do not need it

A node that others continued without may be frozen between its look for newer terms and its next request. So each term
has folders of its own. Before another term chooses a snapshot to restore, or removes the files of an unfinished save, it
closes the folder: it creates a manifest there that says so, and the frozen node cannot commit.
"""

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import xxhash

from holdfast.checkpoint.digest import Digest, is_count, seal, unseal
from holdfast.checkpoint.store import FIRST_TERM, SMALL, Store, read
from holdfast.errors import CommitConflict, Corrupt, NoSnapshot, StorageFailed

LATEST = "latest.json"
AT_ONCE = 16  # files that are removed at the same time
STEP = "step-"
EXTRA_LIMIT = 256 << 20  # bytes: enough for the generators of 10,000 ranks or the names of a million tensors
LAST_TIME = 253_402_214_400  # the last day of the year 9999, the last that datetime supports
_EXTRA, _MANIFEST = "extra.json", "manifest.json"
_CLOSED = seal({"closed": True})  # in place of a manifest: this save will never be committed
# [0-9] instead of \d, which also matches the digits of other scripts.
_NAME = re.compile(r"step-([0-9]{8,18})(?:-term-([0-9]{8}))?(?:/(.+))?")


class StoredFile(NamedTuple):
    """A file of a snapshot; `part` is its name in the folder, or None if the folder cannot be listed."""

    step: int
    term: int
    part: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The commit record of a snapshot: its position in training, and a digest of each of its files.

    `shards` has the digest of each rank's tensor file, and `extra` is the digest of the file with everything else.
    `term` is not a part of the record, but of the folder's name."""

    step: int
    epoch: int
    cursor: int
    world: int
    config: str
    saved: float
    shards: tuple[Digest, ...]
    extra: Digest
    term: int = FIRST_TERM

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
        count = len(self.shards)
        shards = {shard_name(self.step, rank, count, self.term): shard for rank, shard in enumerate(self.shards)}
        return {**shards, extra_name(self.step, self.term): self.extra}

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
    record = {**asdict(manifest), "shards": pairs}
    del record["term"]
    return seal(record)


def shard_name(step: int, rank: int, count: int, term: int = FIRST_TERM) -> str:
    """Return the name of the tensor file that `rank`, one of `count` ranks, saves at `step`."""
    return file_name(step, f"shard-{rank:05d}-of-{count:05d}.safetensors", term)


def extra_name(step: int, term: int = FIRST_TERM) -> str:
    return file_name(step, _EXTRA, term)


def manifest_name(step: int, term: int = FIRST_TERM) -> str:
    return file_name(step, _MANIFEST, term)


def file_name(step: int, part: str = "", term: int = FIRST_TERM) -> str:
    return f"{STEP}{step:08d}{f'-term-{term:08d}' if term > FIRST_TERM else ''}/{part}"


def read_manifest(store: Store, step: int) -> Manifest:
    """Read and validate the commit record of a step; raise NoSnapshot if it is missing, or Corrupt if it is damaged."""
    term = max(terms_of(store, step), default=FIRST_TERM)
    name = manifest_name(step, term)
    try:
        data = read(store, name, SMALL)
    except FileNotFoundError as error:
        raise _missing(store, step) from error
    if is_closed(data):
        raise _missing(store, step)
    record = unseal(data, name)
    try:
        del record["format"]
        manifest = _decoded(record, term)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt(f"{name} is not a valid manifest: {str(error)!r:.200}.") from error
    if manifest.step != step:
        raise Corrupt(f"{name} is the manifest of another snapshot: fall back to an older one.")
    if manifest.extra.length > EXTRA_LIMIT:
        length = manifest.extra.length
        raise Corrupt(f"{name} has an extra of {length} bytes, more than {EXTRA_LIMIT}: fall back to an older one.")
    return manifest


def is_closed(record: bytes) -> bool:
    """Return True if the manifest `record` says that its save will never be committed."""
    return record == _CLOSED


def _missing(store: Store, step: int) -> NoSnapshot:
    return NoSnapshot(f"{store} has no snapshot of step {step}: it has {steps(store) or 'none'}.")


def _decoded(record: Mapping[str, Any], term: int) -> Manifest:
    shards = tuple(Digest(length, xxh3) for length, xxh3 in record["shards"])
    return Manifest(**{**record, "shards": shards, "extra": Digest(**record["extra"])}, term=term)


def steps(store: Store) -> list[int]:
    """Return the steps that have a committed snapshot, damaged or not, in ascending order."""
    return sorted({step for step, _ in _committed(store, files(store))})


def terms_of(store: Store, step: int) -> list[int]:
    """Return the terms that have a snapshot of `step`, or a folder that cannot be listed, in ascending order.

    Several have one if a node committed just after others had begun to continue without it. Readers use the last."""
    return sorted(term for _, term in _in_use(store, _of_step(store, step)))


def name_of(store: Store, step: int) -> str:
    """Return the name of the commit record of a step, whether the step has a snapshot or not."""
    return manifest_name(step, max(terms_of(store, step), default=FIRST_TERM))


def steps_in_use(store: Store) -> list[int]:
    """Return the steps that have a committed snapshot, or a folder that cannot be listed, in ascending order."""
    return sorted({step for step, _ in _in_use(store, files(store))})


def files(store: Store, prefix: str = STEP) -> list[StoredFile]:
    """Return the files of all snapshots, committed or not, whose names begin with `prefix`."""
    return [file for name in store.names(prefix) if (file := _parsed(name))]


def _parsed(name: str) -> StoredFile | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    file = StoredFile(int(match[1]), int(match[2] or FIRST_TERM), match[3])
    return file if f"{name.split('/')[0]}/" == file_name(file.step, term=file.term) else None  # no additional zeros


def _of_step(store: Store, step: int) -> list[StoredFile]:
    return [file for file in files(store, file_name(step).rstrip("/")) if file.step == step]


def _committed(store: Store, listed: Iterable[StoredFile]) -> set[tuple[int, int]]:
    """Return the (step, term) of the folders that have a manifest which is not closed."""
    candidates = _folders(listed).items()
    return {place for place, parts in candidates if _MANIFEST in parts and not _is_void(store, place, parts)}


def _in_use(store: Store, listed: Iterable[StoredFile]) -> set[tuple[int, int]]:
    """Return also the folders that cannot be listed, or whose manifest cannot be read."""
    found = set()
    for place, parts in _folders(listed).items():
        with suppress(StorageFailed):
            if not parts & {None, _MANIFEST} or _is_void(store, place, parts):
                continue
        found.add(place)
    return found


def _folders(listed: Iterable[StoredFile]) -> dict[tuple[int, int], set[str | None]]:
    """Return the names of the files of each folder, by (step, term)."""
    parts: dict[tuple[int, int], set[str | None]] = {}
    for step, term, part in listed:
        parts.setdefault((step, term), set()).add(part)
    return parts


def _is_void(store: Store, place: tuple[int, int], parts: set[str | None]) -> bool:
    """Return True if the folder of (step, term) is closed; read its manifest only if that is possible.

    In a folder that is closed, extra.json is removed next."""
    return (not store.owns(place[1]) or _EXTRA not in parts) and _is_closed(store, *place)


def strange(store: Store) -> list[str]:
    """Return the top-level names in the store that look like a snapshot folder but are invalid."""
    known = {file_name(step, term=term) for step, term, part in files(store) if part}
    tops = dict.fromkeys(f"{name.split('/')[0]}/" for name in store.names(STEP))
    return [top.rstrip("/") for top in tops if top not in known]


def missing(store: Store, manifest: Manifest) -> list[str]:
    """Return the names of the files of a committed snapshot that are missing from the store."""
    listed = set(store.names(file_name(manifest.step, term=manifest.term)))
    return [name for name in (*manifest.files, manifest_name(manifest.step, manifest.term)) if name not in listed]


def remove(store: Store, step: int) -> None:
    """Remove the snapshot of a step, its manifest first; after an error, the call can be repeated."""
    own = {(step, store.term)} if store.owns(store.term) else set()
    for _, term in own:
        store.remove(manifest_name(step, term))  # first: from here on the snapshot does not exist
    listed = _of_step(store, step)
    others = _committed(store, listed) - own
    for _, term in others:
        store.remove(manifest_name(step, term))
    # The unfinished save of another term is left to `clear_uncommitted`, which closes it first.
    left = [file for file in listed if file[:2] in own or (file[:2] in others and file.part != _MANIFEST)]
    names = [file_name(step, part, term) for _, term, part in left if part]
    if len(names) <= AT_ONCE:
        for name in names:
            store.remove(name)
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:  # with thousands of ranks, one request after another takes minutes
        for _ in pool.map(store.remove, names):
            pass


def close_unfinished(store: Store) -> None:
    """Close the folders in which nodes of another term may still commit a save that they have begun."""
    for (step, term), parts in _folders(files(store)).items():
        if _MANIFEST not in parts and _is_committable(store, term, parts) and _close(store, step, term):
            with suppress(StorageFailed):
                store.remove(extra_name(step, term))  # so that readers see that this is no snapshot


def clear_uncommitted(store: Store, before: int | None = None) -> None:
    """Remove the files of uncommitted snapshots, which have no manifest.

    With `before`, only files of steps below it are removed. No rank of these nodes may be writing a file of these
    steps."""
    listed = files(store)  # one list: a snapshot may be committed between two
    committed = _committed(store, listed)
    for (step, term), parts in _folders(listed).items():
        if (step, term) in committed or not (before is None or step < before):
            continue
        if _is_committable(store, term, parts) and not _close(store, step, term):
            continue
        left = sorted(part for part in parts if part and (part != _MANIFEST or store.owns(term)))
        for part in left:
            store.remove(file_name(step, part, term))
        if left:
            store.sweep(file_name(step, term=term))  # a rank that was killed may have left half a file


def _is_committable(store: Store, term: int, parts: set[str | None]) -> bool:
    """Return True if a commit by nodes of another term may be under way: they write extra.json after all other parts."""
    return not store.owns(term) and _EXTRA in parts


def _close(store: Store, step: int, term: int) -> bool:
    """Take the name of a manifest, so that the nodes of `term` never commit this save; return False if they have."""
    try:
        store.create(manifest_name(step, term), [_CLOSED])
    except CommitConflict:
        return _is_closed(store, step, term)
    return True


def _is_closed(store: Store, step: int, term: int) -> bool:
    with suppress(FileNotFoundError, Corrupt):
        return is_closed(read(store, manifest_name(step, term)))
    return False
