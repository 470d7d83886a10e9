"""Checks of a run that has ended: its bits against a failure-free run, its audit, and the things it left behind."""

import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from job import COMMAND, KEEP_LAST, Job
from schedule import INJECTED, STEPS

from holdfast.checkpoint import snapshot
from holdfast.checkpoint.snapshot import Snapshot
from holdfast.checkpoint.store import DirectoryStore
from holdfast.errors import HoldfastError
from holdfast.events import Step, Strike
from holdfast.history.log import read_history

Trained = Mapping[tuple[int, int], tuple[float | None, str | None]]  # by rank and step: the loss, a digest of the state
AUDITED_WITHIN = 300.0


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The result of a run without failures."""

    last: Snapshot
    trained: Trained

    @classmethod
    def of(cls, job: Job) -> "Reference":
        return cls(_last(job), {(step.rank, step.step): (step.loss, step.state) for step in _steps(job)})


def wrong_bits(job: Job, reference: Reference) -> Iterator[str]:
    """Yield differences in the last snapshot, and the first difference in a step of any rank and attempt."""
    try:
        last = _last(job)
    except HoldfastError as error:
        yield f"no last snapshot: {error}"
        return
    if last.step != STEPS:
        yield f"the last snapshot is of step {last.step}, not {STEPS}"
    if last.extra != reference.last.extra:
        yield "the values that are not tensors differ"
    a, b = last.tensors, reference.last.tensors
    if differing := [
        name for name in a.keys() | b.keys() if name not in a or name not in b or not _same(a[name], b[name])
    ]:
        yield f"tensors differ: {', '.join(sorted(differing)[:5])}"
    for step in _steps(job):
        expected = reference.trained[step.rank, step.step]
        if (step.loss, step.state) != expected:
            yield f"attempt {step.attempt}, rank {step.rank}, step {step.step}: {(step.loss, step.state)}, not {expected}"
            return


def wrong_audit(job: Job) -> Iterator[str]:
    """Yield the output of `holdfast audit`, if it does not pass the run."""
    done = subprocess.run(
        [*COMMAND, "audit", str(job.out)], capture_output=True, text=True, timeout=AUDITED_WITHIN, check=False
    )
    if done.returncode:
        yield f"the audit ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-1000:]}"


def left_behind(job: Job) -> Iterator[str]:
    """Yield processes, locks, temporary files, empty folders and snapshots that should not be there."""
    yield from job.gone()
    for place in {job.out, job.checkpoints.parent}:
        yield from (f"temporary file {path.relative_to(place)}" for path in place.rglob("*.tmp"))
    folders = sorted(path for path in job.checkpoints.iterdir() if path.name.startswith(("step-", "set-aside-")))
    yield from (f"empty folder {path.name}" for path in folders if path.is_dir() and not any(path.iterdir()))
    for prefix in ("step-", "set-aside-"):
        if len(names := [path.name for path in folders if path.name.startswith(prefix)]) > KEEP_LAST:
            yield f"more than {KEEP_LAST}: {', '.join(names)}"
    yield from (f"{path.name} without a manifest" for path in folders if _is_uncommitted(path))


def struck_by_the_command(job: Job) -> list[str]:
    """Return the storage faults that the `--inject` schedule of the command has caused."""
    events = [event.what for event in read_history(job.out).events]
    return [kind for event in events if isinstance(event, Strike) and (kind := f"--inject {event.kind}") in INJECTED]


def _is_uncommitted(folder: Path) -> bool:
    return folder.name.startswith("step-") and not (folder / "manifest.json").is_file()


def _last(job: Job) -> Snapshot:
    return snapshot.newest(DirectoryStore(job.checkpoints))


def _steps(job: Job) -> list[Step]:
    return [event.what for event in read_history(job.out).events if isinstance(event.what, Step)]


def _same(a: object, b: object) -> bool:
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
