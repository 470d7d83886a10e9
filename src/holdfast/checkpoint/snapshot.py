"""Whole committed states. A snapshot exists if and only if its manifest does; nothing in it is ever pickled.

step-00000050/state.safetensors   the tensors
step-00000050/extra.json          everything else
step-00000050/manifest.json       the commit record, written last
latest.json                       a hint for people; readers do without it
"""

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from holdfast.blocks import Array, State
from holdfast.checkpoint import digest, payload
from holdfast.checkpoint.digest import Digest, Progress, unwatched
from holdfast.checkpoint.sealed import seal, unseal
from holdfast.checkpoint.store import Store, read
from holdfast.errors import BadInput, CommitConflict, Corrupt, NoSnapshot

logger = logging.getLogger(__name__)

LATEST = "latest.json"
_TENSORS, _EXTRA, _MANIFEST = "state.safetensors", "extra.json", "manifest.json"
_NAME = re.compile(r"step-(\d{8,})/(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The commit record of a snapshot: what it is of, and a digest of every payload."""

    step: int
    epoch: int
    cursor: int
    world: int
    config: str
    saved: float
    payloads: Mapping[str, Digest]

    @property
    def bytes(self) -> int:
        """How large the payloads are together."""
        return sum(expected.length for expected in self.payloads.values())

    @property
    def tensors(self) -> str:
        """The digest of the file that holds the tensors."""
        return self.payloads[_TENSORS].xxh3


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A save that a reader did not use, and why."""

    name: str
    why: str


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A state as it was committed. The tensors share one buffer: copy one out to keep it without the others."""

    manifest: Manifest
    tensors: dict[str, Array]
    extra: dict[str, Any]
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def step(self) -> int:
        return self.manifest.step


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Draft:
    """A snapshot before its commit, without its tensors. To commit it again is no second save: it meets itself."""

    step: int
    extra: bytes
    epoch: int = 0
    cursor: int = 0
    world: int = 1
    config: str = ""
    saved: float = field(default_factory=time.time)

    def manifest(self, payloads: Mapping[str, Digest]) -> Manifest:
        """The commit record, once the payloads are written."""
        return Manifest(
            step=self.step,
            epoch=self.epoch,
            cursor=self.cursor,
            world=self.world,
            config=self.config,
            saved=self.saved,
            payloads=payloads,
        )


def draft(
    step: int, extra: Mapping[str, Any], *, epoch: int = 0, cursor: int = 0, world: int = 1, config: str = ""
) -> Draft:
    """Everything of a snapshot but its tensors, as it is now; what cannot be saved is refused here."""
    if step < 0:
        raise BadInput(f"step {step} cannot be saved: steps count from 0")
    return Draft(step=step, extra=_json(extra), epoch=epoch, cursor=cursor, world=world, config=config)


def save(
    store: Store,
    step: int,
    tensors: State,
    extra: Mapping[str, Any],
    *,
    epoch: int = 0,
    cursor: int = 0,
    world: int = 1,
    config: str = "",
) -> Manifest:
    """Write and commit the snapshot of a step; a good one of the same step is never replaced.

    One process at a time saves into a store. What a killed save left behind is cleared away here.
    """
    unsaved = draft(step, extra, epoch=epoch, cursor=cursor, world=world, config=config)
    return commit(store, unsaved, payload.encode(tensors))


def at_once() -> None:
    """What a commit waits for when it waits for nothing."""


def commit(
    store: Store,
    draft: Draft,
    tensors: Iterable[memoryview | bytes],
    *,
    ready: Callable[[], None] = at_once,
    progress: Progress = unwatched,
) -> Manifest:
    """Write and commit a draft, with its tensors as `payload` encodes them; a try that failed may be repeated.

    `ready` is called once the payloads are written: it returns when the snapshot may come into being, and raises if it
    may not. `progress` is told of the bytes written.
    """
    step = draft.step
    manifest = _cleared(store, draft)
    if manifest is None:
        payloads = {
            _TENSORS: digest.put(store, _name(step, _TENSORS), tensors, progress),
            _EXTRA: digest.put(store, _name(step, _EXTRA), [draft.extra], progress),
        }
        manifest = draft.manifest(payloads)
        ready()
        _commit(store, manifest_name(step), seal(asdict(manifest)))
    else:
        # An earlier try got as far as this name, but perhaps not to the sync that makes the name outlive a power cut.
        store.put(manifest_name(step), [seal(asdict(manifest))])
    store.put(LATEST, [seal({"step": step})])
    logger.info("saved step %d, %d bytes", step, manifest.bytes)
    return manifest


def load(store: Store, step: int, *, progress: Progress = unwatched) -> Snapshot:
    """The snapshot of a step, every byte of it verified; `progress` is told of the bytes read."""
    manifest = read_manifest(store, step)
    buffers = {
        name: digest.fetch(store, _name(step, name), expected, progress) for name, expected in manifest.payloads.items()
    }
    try:
        extra = json.loads(buffers[_EXTRA].tobytes())
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{_name(step, _EXTRA)} is not JSON: fall back to an older save") from error
    return Snapshot(manifest, payload.decode(buffers[_TENSORS], _name(step, _TENSORS)), extra)


def newest(store: Store, *, progress: Progress = unwatched) -> Snapshot:
    """The newest good snapshot, with what had to be passed over to find it; `progress` is told of the bytes read."""
    passed_over: list[PassedOver] = []
    for step in reversed(listed := steps(store)):
        try:
            return replace(load(store, step, progress=progress), passed_over=tuple(passed_over))
        except Corrupt as error:
            logger.warning("passed over the snapshot of step %d: %s", step, error)
            passed_over.append(PassedOver(_name(step), str(error)))
        except NoSnapshot:
            continue  # removed since we looked
    if steps(store) != listed:
        return newest(store, progress=progress)  # a writer has committed and cleared away in the meantime
    bad = "; ".join(passed.why for passed in passed_over)
    raise NoSnapshot(f"{store} holds no good snapshot ({bad or 'it has none at all'}): start from the beginning")


def steps(store: Store) -> list[int]:
    """The steps that have a snapshot, good or not, in order."""
    found = (_NAME.fullmatch(name) for name in store.names("step-"))
    return sorted(int(match[1]) for match in found if match and match[2] == _MANIFEST)


def keep_last(store: Store, count: int) -> list[int]:
    """Remove all but the last snapshots; the newest good one stays, however old it is. Returns the steps removed."""
    old = outdated(store, count)
    for step in old:
        remove(store, step)
    return old


def outdated(store: Store, count: int, *, trusted: int | None = None) -> list[int]:
    """The steps that are not among the last snapshots and may go: the newest good one may not.

    To find a good one is to read it. Who has just committed a step trusts it, and saves that; but not where nothing
    else would be kept, since a disk may have lied.
    """
    if count < 1:
        raise BadInput(f"cannot keep the last {count} snapshots: keep 1 or more")
    listed = steps(store)
    old, kept = listed[:-count], listed[-count:]
    if not old or (trusted in kept and len(kept) > 1) or any(is_good(store, step) for step in reversed(kept)):
        return old
    spared = next((step for step in reversed(old) if is_good(store, step)), None)
    return [step for step in old if step != spared]


def missing(store: Store, manifest: Manifest) -> list[str]:
    """Which names of a snapshot the store does not list, although they were committed."""
    listed = set(store.names(_name(manifest.step)))
    names = (_name(manifest.step, part) for part in (*manifest.payloads, _MANIFEST))
    return [name for name in names if name not in listed]


def is_good(store: Store, step: int) -> bool:
    """Whether every byte of a snapshot is as it was committed."""
    try:
        check(store, step)
    except (Corrupt, NoSnapshot):
        return False
    return True


def check(store: Store, step: int) -> None:
    """Read a snapshot only to see whether it is as it was committed."""
    for name, expected in read_manifest(store, step).payloads.items():
        digest.check(store, _name(step, name), expected)


def read_manifest(store: Store, step: int) -> Manifest:
    """The commit record of a step."""
    name = manifest_name(step)
    try:
        data = read(store, name)
    except FileNotFoundError as error:
        raise NoSnapshot(f"{store} has no snapshot of step {step}: it has {steps(store) or 'none'}") from error
    record = unseal(data, name)
    try:
        payloads = {key: Digest(**value) for key, value in record.pop("payloads").items()}
        del record["format"]
        manifest = Manifest(payloads=payloads, **record)
    except (KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{name} lacks what a manifest must say: {error}") from error
    if manifest.step != step or set(payloads) != {_TENSORS, _EXTRA}:
        raise Corrupt(f"{name} is the manifest of something else: fall back to an older save")
    return manifest


def manifest_name(step: int) -> str:
    """Where the commit record of a step is stored."""
    return _name(step, _MANIFEST)


def _commit(store: Store, name: str, record: bytes) -> None:
    try:
        store.create(name, [record])
    except CommitConflict:
        # A client that lost the answer to its first attempt tries again, and meets its own commit.
        if read(store, name) != record:
            raise


def _cleared(store: Store, draft: Draft) -> Manifest | None:
    """Make room for a save: no temporary files, no payloads without a manifest, no bad snapshot of this step.

    Returns the manifest of this very draft if an earlier try has committed it.
    """
    store.sweep("step-")
    store.sweep(LATEST)
    committed = set(steps(store))
    if draft.step in committed:
        if is_good(store, draft.step):
            return _own(store, draft)
        logger.warning("replacing the snapshot of step %d, which is corrupt", draft.step)
        remove(store, draft.step)
    for name in store.names("step-"):
        match = _NAME.fullmatch(name)
        if match and int(match[1]) not in committed:
            store.remove(name)
    return None


def _own(store: Store, draft: Draft) -> Manifest:
    found = read_manifest(store, draft.step)
    if found != draft.manifest(found.payloads):
        raise CommitConflict(
            f"step {draft.step} is already saved in {store}: resume from it, or use a store of its own"
        )
    return found


def remove(store: Store, step: int) -> None:
    """Remove the snapshot of a step; may be repeated after a failure."""
    store.remove(manifest_name(step))  # first: from here on the snapshot does not exist
    for name in store.names(_name(step)):
        store.remove(name)


def _name(step: int, part: str = "") -> str:
    return f"step-{step:08d}/{part}"


def _json(extra: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadInput(f"extra must be JSON ({error}): flatten the state first") from error
    if json.loads(text) != extra:
        raise BadInput(
            "extra changes on its way through JSON (tuples, or keys that are no strings): flatten the state first"
        )
    return text.encode()
