"""Reads what the next attempt must know about earlier attempts, from the ends of the run's history files.

The files are read back to the newest snapshot at most, so a restart costs the same after a million steps as after a
thousand. Injected failures have small files of their own.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import Corrupt
from holdfast.events import Attempt, Commit, Corruption, Done, Preempted, Recover, Step, Stopped, Strike, Witnessed
from holdfast.history.log import backwards, require_file, stream_history

RANK_0 = "rank-0.jsonl"
INJECTED = "injected-"
Struck = tuple[int, str, int, str]  # step, kind, rank, point


@dataclass(frozen=True, slots=True)
class PastAttempts:
    attempt: int = 0
    struck: frozenset[Struck] = frozenset()


def _last(file: Path, *kinds: type) -> Any:
    return next((event.what for event in backwards(file) if isinstance(event.what, kinds)), None)


def read_past(folder: Path) -> PastAttempts:
    """Return the number of rank 0's last attempt, and all injected failures so far, from the histories in `folder`."""
    last = _last(folder / RANK_0, Attempt, Step, Commit, Recover)
    return PastAttempts(last.attempt if last else 0, frozenset(struck(folder)))


def first_seed(folder: Path, *, has_trained: bool = False) -> int | None:
    """Return the seed that rank 0 first trained with, or None if rank 0 has not trained yet.

    Pass `has_trained` if rank 0 has trained, but its steps may not be in the history yet."""
    file, seed = folder / RANK_0, None
    if file.exists():
        require_file(file)
        for _, event in stream_history(file, []):
            match event.what:
                case Attempt(seed=attempt_seed):
                    seed = attempt_seed
                case Commit() | Step():
                    return seed
    return seed if has_trained else None


def following(attempt: int, where: Path) -> int:
    """Return the number after `attempt`; raise Corrupt if `attempt` is impossibly large for a run.

    `where` is the folder of the history that contains `attempt`, for the error message."""
    if attempt >= 1 << 62:  # far below the largest number that a history may hold
        raise Corrupt(
            f"the history in {where} has an attempt {attempt}, which is not possible: it was changed after it was written. "
            "Restore it from a copy, or name another folder."
        )
    return attempt + 1


def has_commit(folder: Path, step: int) -> bool:
    """Return True if rank 0 committed the snapshot of `step`, and no restore has gone back to an earlier step since."""
    for event in backwards(folder / RANK_0):
        match event.what:
            case Commit(step=committed) if committed == step:
                return True
            case Recover(restored=restored) if restored is None or restored <= step:
                return restored == step
            case Step(step=trained) if trained < step:
                return False  # a commit comes after the last step that it covers
    return False


def committed_state(folder: Path, step: int) -> str | None:
    """Return the digest of the snapshot of `step` that rank 0 committed last; None if no digest is recorded."""
    for event in backwards(folder / RANK_0):
        match event.what:
            case Commit(step=committed, state=state) if committed == step:
                return state
            case Recover(restored=restored) if restored is None or restored < step:
                return None
            case Step(step=trained) if trained < step:
                return None  # a commit comes after the last step that it covers
    return None


def furthest_step(folder: Path) -> int | None:
    """Return how many steps the most advanced rank has trained, in its last attempt; None if there are no histories."""
    lasts = filter(None, (_last(file, Step, Recover) for file in folder.glob("rank-*.jsonl")))
    return max((last.step + 1 if isinstance(last, Step) else last.restored or 0 for last in lasts), default=None)


def last_continued(folder: Path) -> int | None:
    """Return the last attempt in which a rank began to train, at the beginning or after a restore; None if none did."""
    files = sorted(folder.glob("rank-*.jsonl"))
    for file in files:
        require_file(file)
    lasts = filter(None, (_last(file, Step, Recover) for file in files))
    return max((last.attempt for last in lasts), default=None)


def had_snapshots(folder: Path) -> bool:
    """Return True if rank 0 committed or restored a snapshot in its last attempt."""
    last = _last(folder / RANK_0, Commit, Recover)
    return last is not None and (isinstance(last, Commit) or last.restored is not None)


def last_commit(folder: Path) -> int | None:
    """Return the step of the newest snapshot of rank 0 that no later restore rolled back; None if there is none."""
    lowest: int | None = None
    for event in backwards(folder / RANK_0):
        match event.what:
            case Commit(step=step):
                return step if lowest is None else min(step, lowest)
            case Recover(restored=None):
                return None
            case Recover(restored=int(step)):
                lowest = step if lowest is None else min(step, lowest)
    return None


def unresolved_corruption(folder: Path) -> Corruption | None:
    """Return the corruption that ended the last attempt in which rank 0 trained, or None if something else ended it."""
    last = _last(folder / RANK_0, Corruption, Recover)
    return last if isinstance(last, Corruption) else None


def last_witness(folder: Path, rank: int) -> int | None:
    """Return the step of the last witness that `rank` recorded since it was restored; None if there is none."""
    last = _last(folder / f"rank-{rank}.jsonl", Witnessed, Recover)
    return last.step if isinstance(last, Witnessed) else None


@dataclass(frozen=True, slots=True)
class Finish:
    """The last step and attempt of a run, and whether the script `stopped` it before its planned end."""

    step: int
    stopped: bool
    attempt: int

    def __str__(self) -> str:
        return f"stopped by the script at step {self.step}" if self.stopped else f"trained to its end, step {self.step}"


def finish(folder: Path) -> Finish | None:
    """Return the last step and attempt of the run with history `folder`; None if that attempt has not ended."""
    kinds = (Done, Stopped, Preempted, Attempt, Step)
    lasts = [last for file in folder.glob("rank-*.jsonl") if (last := _last(file, *kinds))]
    newest = max((last.attempt for last in lasts), default=0)
    ends = [last for last in lasts if last.attempt == newest]
    ended = [last for last in ends if isinstance(last, Done | Stopped)]
    if not ended or len(ended) < len(ends):
        return None
    return Finish(ended[0].step, isinstance(ended[0], Stopped), newest)


def has_trained(folder: Path) -> bool:
    """Return True if any rank recorded a step in the histories in `folder`."""
    return any(isinstance(event.what, Step) for file in folder.glob("rank-*.jsonl") for event in backwards(file))


def struck(folder: Path) -> list[Struck]:
    """Return the injected failures that have happened so far, as (step, kind, rank, point)."""
    files = list(folder.glob(f"{INJECTED}*.jsonl"))
    for file in files:
        require_file(file)
    events = (event.what for _, event in stream_history(files, []))
    return [(what.step, what.kind, what.rank, what.point) for what in events if isinstance(what, Strike)]
