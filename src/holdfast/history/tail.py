"""What earlier attempts in the same folder left that the next one must know.

It is read from the end of the histories, and no further back than the newest snapshot: a restart costs the same after
a million steps as after a thousand. Failures that have struck have small files of their own.
"""

from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import Corrupt
from holdfast.events import Attempt, Commit, Done, Preempted, Recover, Step, Stopped, Strike
from holdfast.history.log import backwards, require_file, stream_history

FIRST = "rank-0.jsonl"
INJECTED = "injected-"
MOST_ATTEMPTS = 1 << 62  # far from where whole numbers of a history end
Struck = tuple[int, str, int, str]  # step, kind, rank, point


@dataclass(frozen=True, slots=True)
class PastAttempts:
    """The number of the last attempt, and the failures that have struck."""

    attempt: int = 0
    struck: frozenset[Struck] = frozenset()


def read_past(folder: Path) -> PastAttempts:
    """The past of the run whose histories are in this folder; rank 0's tells of attempts."""
    return PastAttempts(_last_attempt(folder / FIRST), frozenset(struck(folder)))


def first_seed(folder: Path) -> int | None:
    """The seed of the run, as rank 0 said before the first commit: before that, nothing has been trained with any."""
    file, seed = folder / FIRST, None
    if file.exists():
        require_file(file)
        for _, event in stream_history(file, []):
            match event.what:
                case Attempt(seed=said):
                    seed = said
                case Commit() | Step():
                    return seed
    return None


def following(attempt: int, where: Path) -> int:
    """The number of the attempt after this one, which is the last that the histories of a run in this place tell of."""
    if attempt >= MOST_ATTEMPTS:
        raise Corrupt(
            f"the history in {where} tells of attempt {attempt}, to which nobody has counted: it was changed after it "
            "was written. Restore it from a copy, or name another folder."
        )
    return attempt + 1


def has_commit(folder: Path, step: int) -> bool:
    """Whether rank 0 has put on record that the snapshot of this step, which stands, was committed."""
    for event in backwards(folder / FIRST):
        match event.what:
            case Commit(step=committed) if committed == step:
                return True
            case Recover(restored=restored) if restored is None or restored <= step:
                return restored == step
            case Step(step=trained) if trained < step:
                return False  # it is committed after the last step that it covers
    return False


def had_snapshots(folder: Path) -> bool:
    """Whether rank 0 has committed anything in its last attempt, or gone on from something."""
    for event in backwards(folder / FIRST):
        match event.what:
            case Commit():
                return True
            case Recover(restored=restored):
                return restored is not None
    return False


def last_commit(folder: Path) -> int | None:
    """The step that rank 0 has committed last, in the line of states that counts: a restore may have gone back."""
    lowest: int | None = None
    for event in backwards(folder / FIRST):
        match event.what:
            case Commit(step=step):
                return step if lowest is None else min(step, lowest)
            case Recover(restored=None):
                return None
            case Recover(restored=int(step)):
                lowest = step if lowest is None else min(step, lowest)
    return None


@dataclass(frozen=True, slots=True)
class Finish:
    """Where a run came to its end, in which attempt: that of its plan, or where its script has stopped it."""

    step: int
    stopped: bool
    attempt: int

    def __str__(self) -> str:
        return f"stopped by the script at step {self.step}" if self.stopped else f"trained to its end, step {self.step}"


def finish(folder: Path) -> Finish | None:
    """The end of the run whose histories are in this folder, if all ranks that wrote here last have said that it is."""
    lasts = [last for file in folder.glob("rank-*.jsonl") if (last := _last(file))]
    newest = max((last.attempt for last in lasts), default=0)
    ends = [last for last in lasts if last.attempt == newest]
    ended = [last for last in ends if isinstance(last, Done | Stopped)]
    if not ended or len(ended) < len(ends):
        return None
    return Finish(ended[0].step, isinstance(ended[0], Stopped), newest)


def _last(file: Path) -> Done | Stopped | Preempted | Attempt | Step | None:
    """How the last life in a file ended, or the last that it says of itself."""
    for event in backwards(file):
        match event.what:
            case Done() | Stopped() | Preempted() | Attempt() | Step():
                return event.what
    return None


def has_trained(folder: Path) -> bool:
    """Whether any rank has put a step on record."""
    return any(isinstance(event.what, Step) for file in folder.glob("rank-*.jsonl") for event in backwards(file))


def _last_attempt(file: Path) -> int:
    for event in backwards(file):
        match event.what:
            case Attempt(attempt=number) | Step(attempt=number) | Commit(attempt=number) | Recover(attempt=number):
                return number
    return 0


def struck(folder: Path) -> list[Struck]:
    """The failures that have struck so far."""
    files = list(folder.glob(f"{INJECTED}*.jsonl"))
    for file in files:
        require_file(file)
    events = (event.what for _, event in stream_history(files, []))
    return [(what.step, what.kind, what.rank, what.point) for what in events if isinstance(what, Strike)]
