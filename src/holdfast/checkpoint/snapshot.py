"""Snapshots: complete saved states. A snapshot exists if and only if its manifest, written last, exists.

step-00000050/state.safetensors   the tensors
step-00000050/extra.json          everything else
step-00000050/manifest.json       the commit record, written last
latest.json                       a hint for people; readers do not need it
set-aside-00000050-0/             a snapshot that was unusable when a run continued without it
"""

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

from holdfast.blocks.division import Array, State
from holdfast.checkpoint import digest, payload
from holdfast.checkpoint.digest import Digest, Progress, is_count, seal, unseal, unwatched
from holdfast.checkpoint.store import Store, read
from holdfast.errors import BadInput, CommitConflict, Corrupt, NoSnapshot, StorageFailed

logger = logging.getLogger(__name__)

LATEST = "latest.json"
EXTRA_LIMIT = 256 << 20  # bytes: enough for the generators of 10,000 ranks or the names of a million tensors
LAST_TIME = 253_402_214_400  # the last day of the year 9999, the last that datetime supports
BACKOFF = (0.1, 0.5, 2.0)
"""Seconds to wait before each retry of an operation that the storage refused."""
_TENSORS, _EXTRA, _MANIFEST, _POSITION = "state.safetensors", "extra.json", "manifest.json", "position"
STEP = "step-"
# [0-9] instead of \d, which also matches the digits of other scripts.
_NAME = re.compile(r"step-([0-9]{8,18})(?:/(.+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The commit record of a snapshot: its position in training, and a digest of each of its files."""

    step: int
    epoch: int
    cursor: int
    world: int
    config: str
    saved: float
    payloads: Mapping[str, Digest]

    def __post_init__(self) -> None:
        counts = (self.step, self.epoch, self.cursor, self.world)
        dated = type(self.saved) in (int, float) and 0 <= self.saved < LAST_TIME
        # An untrusted file has any value.
        if not (all(map(is_count, counts)) and isinstance(self.config, str) and dated):
            raise TypeError("a manifest is made of counts, a config and a time")

    @property
    def position(self) -> dict[str, Any]:
        """The position in training. It is also stored in extra.json, to detect a manifest that was changed."""
        return {name: getattr(self, name) for name in ("step", "epoch", "cursor", "world", "config")}

    @property
    def bytes(self) -> int:
        return sum(expected.length for expected in self.payloads.values())

    @property
    def tensors(self) -> str:
        """The hexadecimal digest of the tensor file."""
        return self.payloads[_TENSORS].xxh3


@dataclass(frozen=True, slots=True)
class PassedOver:
    """The name of a snapshot that was skipped because it is damaged or unreadable, and the reason."""

    name: str
    why: str


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A loaded snapshot. All tensors are views of one buffer: a tensor that is kept keeps all of them in memory."""

    manifest: Manifest
    tensors: dict[str, Array]
    extra: dict[str, Any]
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def step(self) -> int:
        return self.manifest.step


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SnapshotDraft:
    """A snapshot that is not committed yet: everything except its tensors."""

    step: int
    position: dict[str, Any]
    extra: bytes
    saved: float = field(default_factory=time.time)

    def manifest(self, payloads: Mapping[str, Digest]) -> Manifest:
        return Manifest(**self.position, saved=self.saved, payloads=payloads)


def draft(
    step: int, extra: Mapping[str, Any], *, epoch: int = 0, cursor: int = 0, world: int = 1, config: str = ""
) -> SnapshotDraft:
    """Return everything of a new snapshot except its tensors; raise BadInput if `extra` is not plain JSON or too large.

    `cursor` is the index of the next step in its epoch, and `config` a digest of the sample order and model
    structure."""
    if step < 0:
        raise BadInput(f"step {step} cannot be saved: steps count from 0.")
    position = {"step": step, "epoch": epoch, "cursor": cursor, "world": world, "config": config}
    if extra.get(_POSITION, position) != position:
        raise BadInput(f"the extra key {_POSITION!r} is reserved for the position of the snapshot: rename it.")
    whole = {**extra, _POSITION: position}
    try:
        text = json.dumps(whole, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadInput(f"extra must be JSON ({error}): flatten the state first.") from error
    if json.loads(text) != whole:
        raise BadInput("extra does not survive JSON (tuples, or keys that are not strings): flatten the state first.")
    if len(text) > EXTRA_LIMIT:
        raise BadInput(f"an extra of {len(text)} bytes is larger than {EXTRA_LIMIT}: use tensors.")
    return SnapshotDraft(step=step, position=position, extra=text.encode())


def save(store: Store, step: int, tensors: State, extra: Mapping[str, Any], **position: Any) -> Manifest:
    """Write and commit the snapshot of a step; raise CommitConflict if the step already has a good snapshot.

    `position` are the keyword arguments of `draft`. Only one process at a time may save into a store."""
    return commit(store, draft(step, extra, **position), payload.encode(tensors))


def at_once() -> None:
    """Do nothing: the default for a `ready` callback, which may delay a commit."""


def commit(
    store: Store,
    draft: SnapshotDraft,
    tensors: Iterable[memoryview | bytes],
    *,
    ready: Callable[[], None] = at_once,
    progress: Progress = unwatched,
) -> Manifest:
    """Write the files of a new snapshot and commit it; `tensors` are the parts of its tensor file.

    `ready` is called just before the commit; if it raises, nothing is committed. A failed commit may be repeated."""
    step = draft.step
    manifest = _cleared(store, draft)
    if manifest is None:
        payloads = {
            _TENSORS: digest.put(store, _name(step, _TENSORS), tensors, progress),
            _EXTRA: digest.put(store, _name(step, _EXTRA), [draft.extra], progress),
        }
        manifest = draft.manifest(payloads)
        ready()
        record = seal(asdict(manifest))
        try:
            store.create(manifest_name(step), [record])
        except CommitConflict:
            # A client that lost the answer to its first attempt retries, and finds its own commit.
            if read(store, manifest_name(step)) != record:
                raise
    else:
        # An earlier try created this name, but perhaps did not sync it: a power cut could still lose it.
        store.put(manifest_name(step), [seal(asdict(manifest))])
    store.put(LATEST, [seal({"step": step})])
    logger.info("saved step %d, %d bytes", step, manifest.bytes)
    return manifest


def load(store: Store, step: int, *, backoff: Sequence[float] = (), progress: Progress = unwatched) -> Snapshot:
    """Read and verify the snapshot of a step; if the storage fails, retry after each of the pauses in `backoff`."""
    for pause in backoff:
        try:
            return _load(store, step, progress)
        except StorageFailed as error:
            logger.warning("reading the snapshot of step %d again in %g s: %s", step, pause, error)
            time.sleep(pause)
    return _load(store, step, progress)


def _load(store: Store, step: int, progress: Progress) -> Snapshot:
    manifest = read_manifest(store, step)
    buffers = {
        name: digest.fetch(store, _name(step, name), expected, progress) for name, expected in manifest.payloads.items()
    }
    extra = _extra(manifest, buffers[_EXTRA].tobytes())
    return Snapshot(manifest, payload.decode(buffers[_TENSORS], _name(step, _TENSORS)), extra)


def newest(store: Store, *, backoff: Sequence[float] = BACKOFF, progress: Progress = unwatched) -> Snapshot:
    """Return the newest good snapshot, with damaged newer ones in `passed_over`; raise NoSnapshot if none is good."""
    loaded, bad = search(store, backoff, progress)
    if loaded is None:
        why = "; ".join(passed_over.why for passed_over in bad.values())
        raise NoSnapshot(f"{store} has no good snapshot ({why or 'it has none at all'}): start from the beginning.")
    return loaded


Check: TypeAlias = Callable[[Snapshot], None]


def anything(loaded: Snapshot) -> None:
    """Do nothing: the default for a `check` callback, which accepts every snapshot."""


def search(
    store: Store, backoff: Sequence[float], progress: Progress, check: Check = anything
) -> tuple[Snapshot | None, dict[int, PassedOver]]:
    """Return the newest good snapshot, or None, and the newer unusable ones by step.

    `check` raises Corrupt for a snapshot that the caller cannot use. StorageFailed is raised if no snapshot is good but
    one could not be read, since it may be readable later."""
    bad: dict[int, PassedOver] = {}
    refused: StorageFailed | None = None
    for step in reversed(listed := _steps_in_use(store)):
        try:
            loaded = load(store, step, backoff=backoff, progress=progress)
            check(loaded)
            return replace(loaded, passed_over=tuple(bad.values())), bad
        except (Corrupt, StorageFailed) as error:
            logger.warning("passed over the snapshot of step %d: %s", step, error)
            bad[step] = PassedOver(_name(step), str(error))
            refused = refused or (error if isinstance(error, StorageFailed) else None)
        except NoSnapshot:
            continue  # removed meanwhile
    if _steps_in_use(store) != listed:
        return search(store, backoff, progress, check)  # a writer has committed or removed a snapshot meanwhile
    if refused:
        raise StorageFailed(f"no snapshot in {store} is readable now, and training must not start again: {refused}")
    return None, bad


def strange(store: Store) -> list[str]:
    """Return the top-level names in the store that look like a snapshot folder but are invalid."""
    known = {_name(step) for step, part in _parts(store) if part}
    tops = dict.fromkeys(f"{name.split('/')[0]}/" for name in store.names(STEP))
    return [top.rstrip("/") for top in tops if top not in known]


def steps(store: Store) -> list[int]:
    """Return the steps that have a committed snapshot, damaged or not, in ascending order."""
    return sorted(step for step, part in _parts(store) if part == _MANIFEST)


def missing(store: Store, manifest: Manifest) -> list[str]:
    """Return the names of the files of a committed snapshot that are missing from the store."""
    listed = set(store.names(_name(manifest.step)))
    names = (_name(manifest.step, part) for part in (*manifest.payloads, _MANIFEST))
    return [name for name in names if name not in listed]


def is_good(store: Store, step: int) -> bool:
    """Return True if the snapshot of a step can be read and matches its digests."""
    try:
        check(store, step)
    except (Corrupt, NoSnapshot, StorageFailed):
        return False
    return True


def check(store: Store, step: int, *, progress: Progress = unwatched) -> None:
    """Verify the snapshot of a step by reading all of it; raise Corrupt, NoSnapshot or StorageFailed."""
    manifest = read_manifest(store, step)
    _extra(manifest, digest.fetch(store, _name(step, _EXTRA), manifest.payloads[_EXTRA], progress).tobytes())
    name, expected = _name(step, _TENSORS), manifest.payloads[_TENSORS]
    digest.check(store, name, expected, progress)
    with digest.opened(store, name, expected) as reader:
        payload.check_header(reader, name)


def read_manifest(store: Store, step: int) -> Manifest:
    """Read and validate the commit record of a step; raise NoSnapshot if it is missing, or Corrupt if it is damaged."""
    name = manifest_name(step)
    try:
        data = read(store, name)
    except FileNotFoundError as error:
        raise NoSnapshot(f"{store} has no snapshot of step {step}: it has {steps(store) or 'none'}.") from error
    record = unseal(data, name)
    try:
        payloads = {key: Digest(**value) for key, value in record.pop("payloads").items()}
        del record["format"]
        manifest = Manifest(payloads=payloads, **record)
    except (KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{name} is not a valid manifest: {str(error)!r:.200}.") from error
    if manifest.step != step or set(payloads) != {_TENSORS, _EXTRA}:
        raise Corrupt(f"{name} is the manifest of another snapshot: fall back to an older one.")
    if payloads[_EXTRA].length > EXTRA_LIMIT:
        length = payloads[_EXTRA].length
        raise Corrupt(f"{name} has an extra of {length} bytes, more than {EXTRA_LIMIT}: fall back to an older one.")
    return manifest


def manifest_name(step: int) -> str:
    return _name(step, _MANIFEST)


def tensors_name(step: int) -> str:
    return _name(step, _TENSORS)


def _parts(store: Store) -> Iterator[tuple[int, str | None]]:
    for name in store.names(STEP):
        match = _NAME.fullmatch(name)
        if match and match[1] == f"{int(match[1]):08d}":  # without additional zeros
            yield int(match[1]), match[2]


def _steps_in_use(store: Store) -> list[int]:
    return sorted({step for step, part in _parts(store) if part in (None, _MANIFEST)})


def _cleared(store: Store, draft: SnapshotDraft) -> Manifest | None:
    """Remove temporary files, and a corrupt snapshot of this step; return the manifest if `draft` is committed."""
    store.sweep(STEP)
    store.sweep(LATEST)
    if draft.step in steps(store):
        try:
            check(store, draft.step)  # an unreadable snapshot is not replaced: it may be good
            manifest = read_manifest(store, draft.step)
            if manifest == draft.manifest(manifest.payloads):
                return manifest
            raise CommitConflict(
                f"step {draft.step} is already saved in {store}: resume from it, or use another store."
            )
        except (Corrupt, NoSnapshot):
            logger.warning("replacing the snapshot of step %d, which is corrupt", draft.step)
            remove(store, draft.step)
    clear_uncommitted(store)
    return None


def clear_uncommitted(store: Store) -> None:
    """Remove the files of snapshots that have no manifest."""
    committed = set(steps(store))
    for step, part in list(_parts(store)):
        if part and step not in committed:
            store.remove(_name(step, part))


def outdated(store: Store, count: int, *, trusted: int | None = None) -> list[int]:
    """Return the steps of snapshots that may be removed: all but the last `count`, and never the newest good one.

    The snapshot of step `trusted` counts as good without being read, unless it is the only one kept."""
    if count < 1:
        raise BadInput(f"the number of snapshots to keep must be 1 or more (got {count}).")
    listed = steps(store)
    old, kept = listed[:-count], listed[-count:]
    if not old or (trusted in kept and len(kept) > 1) or any(is_good(store, step) for step in reversed(kept)):
        return old
    spared = next((step for step in reversed(old) if is_good(store, step)), None)
    # If none is good, the storage may only be unreadable at the moment: remove nothing.
    return [step for step in old if step != spared] if spared is not None else []


def remove(store: Store, step: int) -> None:
    """Remove the snapshot of a step, its manifest first; after an error, the call can be repeated."""
    store.remove(manifest_name(step))  # first: from here on the snapshot does not exist
    for name in store.names(_name(step)):
        store.remove(name)


def folder(step: int) -> str:
    return _name(step).rstrip("/")


def _name(step: int, part: str = "") -> str:
    return f"{STEP}{step:08d}/{part}"


def _extra(manifest: Manifest, text: bytes) -> dict[str, Any]:
    def reject(word: str) -> float:
        raise ValueError(f"{word} is not JSON")

    name = _name(manifest.step, _EXTRA)
    try:
        extra = json.loads(text, parse_constant=reject)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{name} is not JSON: fall back to an older snapshot.") from error
    if not isinstance(extra, dict):
        raise Corrupt(f"{name} is not a JSON object: fall back to an older snapshot.")
    if extra.pop(_POSITION, None) != manifest.position:
        raise Corrupt(
            f"{name} and its manifest differ in step, epoch, cursor or config: one of the two files was changed."
        )
    return extra
