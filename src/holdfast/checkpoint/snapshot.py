"""Whole committed states. A snapshot exists if and only if its manifest does; nothing in it is ever pickled.

step-00000050/state.safetensors   the tensors
step-00000050/extra.json          everything else
step-00000050/manifest.json       the commit record, written last
latest.json                       a hint for people; readers do without it
set-aside-00000050-0/             a snapshot that could not be used when a run went on without it
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
from holdfast.checkpoint.digest import Digest, Progress, unwatched
from holdfast.checkpoint.sealed import is_count, seal, unseal
from holdfast.checkpoint.store import Store, read
from holdfast.errors import BadInput, CommitConflict, Corrupt, NoSnapshot, StorageFailed

logger = logging.getLogger(__name__)

LATEST = "latest.json"
EXTRA_LIMIT = 256 << 20  # bytes of an extra: the generators of 10,000 ranks, or a million tensors' names, have as many
LAST_TIME = 253_402_214_400  # the last day of the year 9999, beyond which there are no dates
BACKOFF = (0.1, 0.5, 2.0)
"""Seconds to wait before each further try of what the storage refused."""
_TENSORS, _EXTRA, _MANIFEST, _POSITION = "state.safetensors", "extra.json", "manifest.json", "position"
STEP = "step-"
# Digits of 0 to 9: `\d` is also those of every other script, and such a name is not one that we give.
_NAME = re.compile(r"step-([0-9]{8,18})(?:/(.+))?")


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

    def __post_init__(self) -> None:
        counts = (self.step, self.epoch, self.cursor, self.world)
        dated = type(self.saved) in (int, float) and 0 <= self.saved < LAST_TIME
        if not (all(map(is_count, counts)) and isinstance(self.config, str) and dated):  # a stranger's may say anything
            raise TypeError("a manifest is made of counts, a config and a time")

    @property
    def position(self) -> dict[str, Any]:
        """What the snapshot is of. The extra says it too: who changes one, and seals it anew, contradicts the other."""
        return {name: getattr(self, name) for name in ("step", "epoch", "cursor", "world", "config")}

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
    position = {"step": step, "epoch": epoch, "cursor": cursor, "world": world, "config": config}
    if extra.get(_POSITION, position) != position:
        raise BadInput(f"{_POSITION!r} in an extra is what the snapshot is of: give it another name")
    text = _json({**extra, _POSITION: position})
    return Draft(step=step, extra=text, epoch=epoch, cursor=cursor, world=world, config=config)


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


def load(store: Store, step: int, *, backoff: Sequence[float] = (), progress: Progress = unwatched) -> Snapshot:
    """The snapshot of a step, every byte of it verified; `progress` is told of the bytes read.

    What the storage refuses to read is tried again after each pause of `backoff`.
    """
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
    """The newest good snapshot, with what had to be passed over to find it; `progress` is told of the bytes read.

    One that the storage refuses to read is tried again after each pause of `backoff`, then passed over.
    """
    found, bad = search(store, backoff, progress)
    if found is None:
        why = "; ".join(each.why for each in bad.values())
        raise NoSnapshot(f"{store} holds no good snapshot ({why or 'it has none at all'}): start from the beginning")
    return found


Check: TypeAlias = Callable[[Snapshot], None]


def anything(found: Snapshot) -> None:
    """The check that every good snapshot passes."""


def search(
    store: Store, backoff: Sequence[float], progress: Progress, check: Check = anything
) -> tuple[Snapshot | None, dict[int, PassedOver]]:
    """The newest good snapshot, if there is one, and why each newer step was passed over.

    `check` raises Corrupt for what the caller cannot use: that is passed over, too.

    To find nothing means that all there was is damaged. Where the storage refused to read a snapshot, and none that is
    older is good, nobody may start from the beginning: it may hold weeks of training that are there again tomorrow.
    """
    bad: dict[int, PassedOver] = {}
    refused: StorageFailed | None = None
    for step in reversed(listed := _claimed(store)):
        try:
            found = load(store, step, backoff=backoff, progress=progress)
            check(found)
            return replace(found, passed_over=tuple(bad.values())), bad
        except (Corrupt, StorageFailed) as error:
            logger.warning("passed over the snapshot of step %d: %s", step, error)
            bad[step] = PassedOver(_name(step), str(error))
            refused = refused or (error if isinstance(error, StorageFailed) else None)
        except NoSnapshot:
            continue  # removed since we looked
    if _claimed(store) != listed:
        return search(store, backoff, progress, check)  # a writer has committed and cleared away in the meantime
    if refused:
        raise StorageFailed(f"no snapshot in {store} can be used now, and nothing is begun anew for that: {refused}")
    return None, bad


def strange(store: Store) -> list[str]:
    """Names that look like a snapshot's and are none that we give: other digits, other lengths, no folder."""
    known = {_name(step) for step, part in _parts(store) if part}
    tops = dict.fromkeys(f"{name.split('/')[0]}/" for name in store.names(STEP))
    return [top.rstrip("/") for top in tops if top not in known]


def steps(store: Store) -> list[int]:
    """The steps that have a snapshot, good or not, in order."""
    return sorted(step for step, part in _parts(store) if part == _MANIFEST)


def missing(store: Store, manifest: Manifest) -> list[str]:
    """Which names of a snapshot the store does not list, although they were committed."""
    listed = set(store.names(_name(manifest.step)))
    names = (_name(manifest.step, part) for part in (*manifest.payloads, _MANIFEST))
    return [name for name in names if name not in listed]


def is_good(store: Store, step: int) -> bool:
    """Whether every byte of a snapshot is as it was committed; one that cannot be read is not known to be."""
    try:
        check(store, step)
    except (Corrupt, NoSnapshot, StorageFailed):
        return False
    return True


def check(store: Store, step: int, *, progress: Progress = unwatched) -> None:
    """Read a snapshot only to see whether it is as it was committed."""
    manifest = read_manifest(store, step)
    _extra(manifest, digest.fetch(store, _name(step, _EXTRA), manifest.payloads[_EXTRA], progress).tobytes())
    name, expected = _name(step, _TENSORS), manifest.payloads[_TENSORS]
    digest.check(store, name, expected, progress)
    with digest.opened(store, name, expected) as reader:
        payload.check_header(reader, name)


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
        raise Corrupt(f"{name} lacks what a manifest must say: {str(error)!r:.200}") from error
    if manifest.step != step or set(payloads) != {_TENSORS, _EXTRA}:
        raise Corrupt(f"{name} is the manifest of something else: fall back to an older save")
    if payloads[_EXTRA].length > EXTRA_LIMIT:
        raise Corrupt(
            f"{name} speaks of an extra of {payloads[_EXTRA].length} bytes: no more than {EXTRA_LIMIT} can be"
        )
    return manifest


def manifest_name(step: int) -> str:
    """Where the commit record of a step is stored."""
    return _name(step, _MANIFEST)


def tensors_name(step: int) -> str:
    """Where the tensors of a step are stored: nearly all of its bytes."""
    return _name(step, _TENSORS)


def _commit(store: Store, name: str, record: bytes) -> None:
    try:
        store.create(name, [record])
    except CommitConflict:
        # A client that lost the answer to its first attempt tries again, and meets its own commit.
        if read(store, name) != record:
            raise


def _parts(store: Store) -> Iterator[tuple[int, str | None]]:
    """Of every name in a step's folder the step and the rest of the name, which is None for what is no folder."""
    for name in store.names(STEP):
        match = _NAME.fullmatch(name)
        if match and match[1] == f"{int(match[1]):08d}":  # not one with more zeros than we write
            yield int(match[1]), match[2]


def _claimed(store: Store) -> list[int]:
    """The steps that have a snapshot, or something in its place that cannot be looked into."""
    return sorted({step for step, part in _parts(store) if part in (None, _MANIFEST)})


def _cleared(store: Store, draft: Draft) -> Manifest | None:
    """Make room for a save: no temporary files, no payloads without a manifest, no bad snapshot of this step.

    Returns the manifest of this very draft if an earlier try has committed it.
    """
    store.sweep(STEP)
    store.sweep(LATEST)
    if draft.step in steps(store):
        try:
            check(store, draft.step)  # what cannot be read is not replaced: it may be good
            return _own(store, draft)
        except (Corrupt, NoSnapshot):
            logger.warning("replacing the snapshot of step %d, which is corrupt", draft.step)
            remove(store, draft.step)
    clear_uncommitted(store)
    return None


def clear_uncommitted(store: Store) -> None:
    """Remove payloads that were never committed."""
    committed = set(steps(store))
    for step, part in list(_parts(store)):
        if part and step not in committed:
            store.remove(_name(step, part))


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


def folder(step: int) -> str:
    """Where the snapshot of a step is stored."""
    return _name(step).rstrip("/")


def _name(step: int, part: str = "") -> str:
    return f"{STEP}{step:08d}/{part}"


def _extra(manifest: Manifest, text: bytes) -> dict[str, Any]:
    """What was saved beside the tensors, if it is of the very step, epoch, cursor, world and config of the manifest."""
    name = _name(manifest.step, _EXTRA)
    try:
        extra = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{name} is not JSON: fall back to an older save") from error
    if not isinstance(extra, dict):
        raise Corrupt(f"{name} is not what a save has written: fall back to an older one")
    if not extra:  # a save says at least what it is of
        raise Corrupt(f"{name} says nothing, and no save writes that: fall back to an older one")
    # Snapshots of before there was a position have none.
    if extra.pop(_POSITION, manifest.position) != manifest.position:
        raise Corrupt(
            f"{name} is of another step, epoch, cursor or config than its manifest: one of them was relabelled"
        )
    return extra


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def _json(extra: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadInput(f"extra must be JSON ({error}): flatten the state first") from error
    if json.loads(text) != extra:
        raise BadInput(
            "extra changes on its way through JSON (tuples, or keys that are no strings): flatten the state first"
        )
    if len(text) > EXTRA_LIMIT:
        raise BadInput(f"an extra of {len(text)} bytes is more than the {EXTRA_LIMIT} it may have: use tensors")
    return text.encode()
