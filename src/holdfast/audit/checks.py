"""Was it right: the checks of an audit, each a pure function from the ledger of a run to a verdict and its reason.

A check passes only if something was tested.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, TypeAlias

from holdfast.audit.defects import absent, defects, described
from holdfast.audit.ledger import CannotTell, Commit, Ledger, Recover, Step, attempt_of, number, rank_of
from holdfast.geometry import Position

Verdict: TypeAlias = Literal["pass", "fail", "unknown"]
PLANNED = ("samples", "batch", "epochs", "seed", "config")  # how often to save, and by which writer, may change


def one_plan(ledger: Ledger) -> tuple[Verdict, str]:
    """All attempts train the same samples in the same order."""
    geometry = ledger.geometry
    first, *others = ledger.all("plan")
    for other in others:
        differing = [
            f"{name} ({first.fields.get(name)}, then {other.fields.get(name)})"
            for name in PLANNED
            if first.fields.get(name) != other.fields.get(name)
        ]
        if differing:
            return "fail", f"attempts {attempt_of(first)} and {attempt_of(other)} differ in {', '.join(differing)}"
    return "pass", (
        f"{counted(1 + len(others), 'attempt')} by one plan: {counted(geometry.epochs, 'epoch')} of "
        f"{counted(geometry.steps_per_epoch, 'window')} of {counted(geometry.batch, 'sample')}"
    )


def reached_the_end(ledger: Ledger) -> tuple[Verdict, str]:
    """All ranks trained to the end of the plan, and the last state was committed."""
    end = ledger.geometry.steps
    ranks: defaultdict[int, set[str]] = defaultdict(set)
    for event in ledger.all("done"):
        if (step := number(event, "step")) != end:
            return "fail", f"{event.who} was done at step {step} of {end} in attempt {attempt_of(event)}"
        ranks[attempt_of(event)].add(event.who)
    finished = [attempt for attempt, who in ranks.items() if len(who) == ledger.worlds.get(attempt)]
    if finished and ledger.committed == end:
        return "pass", f"all ranks were done at step {end} in attempt {max(finished)}"
    reached = 1 + max((step.step for step in ledger.steps), default=-1)
    far = f"{counted(reached, 'step')} of {end} trained, {ledger.committed} of them committed"
    if finished and max(finished) == max(ledger.worlds):
        return "fail", f"all ranks were done in attempt {max(finished)}, with {far}"
    return "unknown", f"the run did not reach its end: {far}"


def restores_only_committed(ledger: Ledger) -> tuple[Verdict, str]:
    """A snapshot comes back only if it was committed before, the same on all ranks, and training goes on where it ends."""
    committed: set[int] = set()
    restores = 0
    for each in ledger.commits_and_recovers:
        if isinstance(each, Commit):
            committed.add(each.step)
        elif each.restored is not None:
            restores += 1
            if each.restored not in committed:
                return "fail", f"{_restored(each)}, not committed by then"
    if not committed:
        return "unknown", "nothing was committed"
    if because := _disagreement(ledger.recovers) or _wrong_position(ledger):
        return "fail", because
    return "pass", f"{counted(restores, 'restore')}, {counted(len(committed), 'committed step')}"


def every_cursor_advances_once(ledger: Ledger) -> tuple[Verdict, str]:
    """Without what was rolled back, every window is trained in one attempt, in order, and none is left out."""
    if not ledger.steps:
        return "unknown", "no step was trained and kept"
    run = [reports[0] for reports in ledger.windows.values()]
    if (run[0].at, run[0].step) != (Position(), 0):
        return "fail", f"the run starts at {_place(run[0])}"
    if because := _trained_again(ledger.steps) or _jump(ledger, run):
        return "fail", because
    return "pass", f"{counted(len(run), 'window')} from {run[0].at} to {run[-1].at}"


def shares_agree(ledger: Ledger) -> tuple[Verdict, str]:
    """Ranks that report the same step mean the same window and world, and all report what is committed."""
    groups: defaultdict[tuple[int, int], list[Step]] = defaultdict(list)
    for step in ledger.steps:
        groups[step.attempt, step.step].append(step)
    complete = 0
    for group in groups.values():
        if because := _difference(group) or _stranger(group):
            return "fail", because
        if not (silent := absent(group)):
            complete += 1
        elif group[0].step < ledger.committed:
            return "fail", f"{', '.join(silent)} never reported {_place(group[0])}, which was committed"
    if not complete:
        return "unknown", "no step was reported by all ranks of its world"
    return "pass", f"{counted(complete, 'step')} reported by all ranks of their world"


def every_sample_trained_once(ledger: Ledger) -> tuple[Verdict, str]:
    """The windows that were kept hold exactly the samples that the plan gives them."""
    found = defects(ledger)
    if found:
        return "fail", described(ledger, found)
    if not found.compared:
        return "unknown", "no window was reported by all ranks of its world"
    rest = (
        f"; {counted(found.unfinished, 'window')} not reported by all ranks or committed yet"
        if found.unfinished
        else ""
    )
    windows = f"{counted(found.compared, 'window')} of {counted(ledger.geometry.batch, 'sample')}"
    return "pass", f"{windows}: duplicates = missing = extra = 0{rest}"


def generators_restored(ledger: Ledger) -> tuple[Verdict, str]:
    """Ranks that go on from a snapshot draw the random numbers that the ranks before them would have drawn."""
    if not ledger.steps:
        return "unknown", "no step was trained and kept"
    recovered = {(recover.who, recover.attempt) for recover in ledger.recovers}
    for step in ledger.steps:
        if step.attempt > 1 and (step.who, step.attempt) not in recovered:
            return "fail", f"{step.who} trained {_place(step)} in attempt {step.attempt} and never said what came back"
    came_back = [recover for recover in ledger.recovers if recover.restored is not None]
    if because := next(filter(None, (_unlike(ledger, recover) for recover in came_back)), None):
        return "fail", because
    if not came_back:
        return "pass", "nothing went on from a snapshot"
    keyed = sum(recover.rng == "keyed" for recover in came_back)
    return "pass", f"{len(came_back) - keyed} restored, {keyed} keyed for another number of ranks"


def _disagreement(recovers: Iterable[Recover]) -> str | None:
    last = {(recover.attempt, recover.who): recover for recover in recovers}
    first: dict[int, Recover] = {}
    for recover in last.values():
        other = first.setdefault(recover.attempt, recover)
        if (other.restored, other.at) != (recover.restored, recover.at):
            return f"{_restored(recover)}, and {_restored(other)}"
    return None


def _wrong_position(ledger: Ledger) -> str | None:
    if not ledger.all("plan"):
        return None
    geometry = ledger.geometry
    for recover in ledger.recovers:
        restored = recover.restored or 0
        planned = geometry.position(restored) if 0 <= restored <= geometry.steps else None
        if recover.at is not None and recover.at != planned:
            return f"{_restored(recover)} and went on with {recover.at}, not {planned or 'within the plan'}"
    return None


def _restored(recover: Recover) -> str:
    what = "nothing" if recover.restored is None else f"step {recover.restored}"
    return f"{recover.who} restored {what} in attempt {recover.attempt}"


def _trained_again(steps: Iterable[Step]) -> str | None:
    first: dict[Position, Step] = {}
    for step in steps:
        before = first.setdefault(step.at, step)
        if before.attempt != step.attempt:
            return (
                f"{before.who} trained {step.at} in attempt {before.attempt} and {step.who} in attempt "
                f"{step.attempt}, and no recover declares either rolled back"
            )
    return None


def _jump(ledger: Ledger, run: Sequence[Step]) -> str | None:
    """The first move, of a rank within an attempt or of the run, that is not to the next window and step."""
    paths: defaultdict[tuple[str, int], list[Step]] = defaultdict(list)
    for step in ledger.steps:
        paths[step.who, step.attempt].append(step)
    length = _epoch_length(ledger, run)
    for (who, attempt), path in paths.items():
        if move := _wrong_move(path, length):
            return f"{who} in attempt {attempt} {move}"
    move = _wrong_move(run, length)
    return f"the run {move}" if move else None


def _wrong_move(path: Sequence[Step], length: int | None) -> str | None:
    for a, b in pairwise(path):
        epoch, cursor = a.at
        following = (epoch + 1, 0) if cursor + 1 == length else (epoch, cursor + 1)
        if b.step != a.step + 1 or b.at != following:
            return f"went from {_place(a)} to {_place(b)}"
    return None


def _epoch_length(ledger: Ledger, run: Sequence[Step]) -> int | None:
    if ledger.all("plan"):
        return ledger.geometry.steps_per_epoch
    # The history does not say how long an epoch is; but all are as long as the longest that came to an end.
    return max((a.at.cursor + 1 for a, b in pairwise(run) if a.at.epoch < b.at.epoch), default=None)


def _difference(group: Sequence[Step]) -> str | None:
    first = group[0]
    for other in group[1:]:
        if (first.at, first.world) != (other.at, other.world):
            return (
                f"step {first.step} of attempt {first.attempt} is {first.at} of world {first.world} to {first.who} "
                f"and {other.at} of world {other.world} to {other.who}"
            )
    return None


def _stranger(group: Sequence[Step]) -> str | None:
    for step in group:
        if (rank := rank_of(step.who)) is None or rank >= step.world:
            return f"{step.who} reports {_place(step)} of attempt {step.attempt}, whose world has {step.world} ranks"
    return None


def _unlike(ledger: Ledger, recover: Recover) -> str | None:
    """In what way the generators of this rank did not come back."""
    if recover.rng == "restored":
        return None
    if recover.rng is None:
        raise CannotTell(f"a recover event of {recover.who} does not say what became of its generators")
    assert recover.restored is not None
    saved, now = ledger.world_that_saved(recover.restored, recover.attempt), ledger.worlds.get(recover.attempt)
    if saved is None or now is None:
        raise CannotTell(f"the history does not tell how many ranks saved step {recover.restored}")
    if recover.rng == "keyed" and saved != now:
        return None
    return f"{_restored(recover)} with its generators {recover.rng}, not restored, in the same world of {now}"


def _place(step: Step) -> str:
    return f"{step.at} (step {step.step})"


def counted(number: int, noun: str) -> str:
    """So many of them, in words."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
