"""The points of a step at which a process can be made to fail, as a schedule names them, and what makes no sense. Pure.

    point        when it strikes
    boundary     before the window is handed out
    forward      once the forward of a replicated model has begun, before it computes
    backward=F   once the part F of DDP's buckets, rounded down, is posted and summed on every rank: 0 is before the
                 first sum, 1 after the last
    optimizer    once every sum is there, before an optimizer steps
    save         in the first save at or after the step: where rank 0 writes, with all payloads written and nothing
                 committed; elsewhere when rank 0 has what it needs for the save
    recovery     in the first live recovery from another's loss at or after the step, once it is settled how to go on

The faults of storage have points of their own, in a save.
"""

from collections import defaultdict

from holdfast.errors import BadInput
from holdfast.faults import storage
from holdfast.faults.schedule import ENDING, Failure, Schedule

BACKWARD = "backward="
POINTS = ("boundary", "forward", "backward", "optimizer", "save", "recovery")


def word(failure: Failure) -> str:
    """The point without the part of it that is a number."""
    return failure.point.partition("=")[0]


def summed(failure: Failure, buckets: int) -> int:
    """After how many of so many buckets it strikes: as many whole ones as the fraction holds, as in the simulation."""
    return int(round(float(failure.point.removeprefix(BACKWARD)) * buckets, 6))  # 6: 0.7 x 10 must not fall short of 7


def check(failure: Failure, recovery: str) -> None:
    """Refuse a point that no step has, or that this fault or this way to recover never comes to."""
    if failure.kind in storage.KINDS:
        if failure.point not in ("boundary", *storage.POINTS):
            raise BadInput(f"{failure.kind} cannot strike at {failure.point!r}: a save has {_listed(storage.POINTS)}.")
        return
    if failure.point == "backward":
        raise BadInput("backward has many points: say after which part of the buckets, such as backward=0.5.")
    if word(failure) not in POINTS or ("=" in failure.point and not failure.point.startswith(BACKWARD)):
        raise BadInput(
            f"{failure.kind} cannot strike at {failure.point!r}: choose {_listed(POINTS).replace('backward', 'backward=0.5')}."
        )
    if failure.point.startswith(BACKWARD) and not _is_part(failure.point.removeprefix(BACKWARD)):
        raise BadInput(f"there is no point {failure.point!r}: give the part of the buckets from 0 to 1.")
    if failure.point == "recovery" and recovery == "restart":
        raise BadInput("no failure can strike at recovery: restart has none that goes on; choose another --recovery.")


def check_survivors(failures: Schedule, recovery: str, ranks: int) -> None:
    """Refuse to lose every rank in one step where others are to go on."""
    lost: defaultdict[int, set[int]] = defaultdict(set)
    for each in failures:
        if each.kind in ENDING:
            lost[each.step] |= set(each.targets or (0,))
    for step, targets in lost.items():
        if recovery != "restart" and len(targets) >= ranks:
            raise BadInput(
                f"all {ranks} workers are to be lost in step {step}, and {recovery} needs one that goes on: "
                "name fewer ranks, or choose --recovery restart."
            )


def _is_part(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


def _listed(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
