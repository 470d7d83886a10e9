"""The points of a step where a process can be made to fail, and checks of requested failures.

    point        when the failure strikes
    boundary     before the batch of the step is handed out
    forward      when the forward of a model begins
    forward=F    when the fraction F of the modules of a sharded model have gathered their parameters
    backward=F   when the fraction F of DDP's buckets, or of the reduce-scatters of a sharded model, rounded down, is
                 posted and summed on every rank: 0 is before the first sum, 1 after the last
    optimizer    when every sum is done, before an optimizer steps
    save         in the first save at or after the step, when the rank has written its file and not yet voted
    recovery     in the first live recovery from another worker's loss at or after the step, once the plan is made

A flip strikes before the batch of the step is handed out, and its point says what it changes: `weight` (default) or
`moment`, of the optimizer, with the number of the bit as in `weight=30`; otherwise the bit is random.

Storage faults have points of their own (`storage.POINTS`), all within a save.
"""

import re
from collections import defaultdict

from holdfast.errors import BadInput
from holdfast.faults import storage
from holdfast.faults.schedule import ENDING, Failure, Schedule

BACKWARD, FORWARD = "backward=", "forward="
POINTS = ("boundary", "forward", "backward", "optimizer", "save", "recovery")
FLIP, WEIGHT, MOMENT = "flip", "weight", "moment"


def name(failure: Failure) -> str:
    """Return the name of the point where `failure` strikes, without a number: `backward` for `backward=0.5`."""
    return failure.point.partition("=")[0]


def summed_buckets(failure: Failure, buckets: int) -> int:
    """Return how many of the `buckets` gradient buckets are all-reduced before `failure` strikes the backward pass."""
    return int(round(float(failure.point.removeprefix(BACKWARD)) * buckets, 6))  # 6: 0.7 x 10 must not fall short of 7


def gathered_fraction(failure: Failure) -> float:
    """Return the fraction of a sharded model's modules that gather before `failure` strikes the forward pass."""
    return float(failure.point.removeprefix(FORWARD)) if failure.point.startswith(FORWARD) else 0.0


def flipped(failure: Failure) -> tuple[str, int | None]:
    """Return what the flip `failure` changes, WEIGHT or MOMENT, and the bit (None if it is random)."""
    what, _, bit = failure.point.partition("=")
    return (WEIGHT if what == "boundary" else what), (int(bit) if bit else None)


def check(failure: Failure, recovery: str) -> None:
    """Raise BadInput if `failure` cannot be injected at its point of a step under the recovery strategy `recovery`."""
    kind, point = failure.kind, failure.point
    if kind in storage.KINDS:
        if point not in ("boundary", *storage.POINTS):
            choices = f"{', '.join(storage.POINTS[:-1])} or {storage.POINTS[-1]}"
            raise BadInput(f"{kind} cannot strike at {point!r}: choose {choices}.")
        return
    if kind == FLIP:
        if not re.fullmatch(r"boundary|(weight|moment)(=[0-9]{1,2})?", point):
            raise BadInput(f"flip cannot change {point!r}: choose weight or moment, with a bit as in weight=30.")
        return
    if point == "backward":
        raise BadInput("backward needs the fraction of gradient buckets that are summed, such as backward=0.5.")
    if name(failure) not in POINTS or ("=" in point and not point.startswith((BACKWARD, FORWARD))):
        choices = "boundary, forward, backward=0.5, optimizer, save or recovery"
        raise BadInput(f"{kind} cannot strike at {point!r}: choose {choices}.")
    if "=" in point and not _is_fraction(point.partition("=")[2]):
        raise BadInput(f"{point!r} is not a point of a step: give a fraction from 0 to 1.")
    if point == "recovery" and recovery == "restart":
        raise BadInput("No failure can strike at recovery with --recovery restart: choose replay, forward or skip.")


def check_survivors(failures: Schedule, recovery: str, ranks: int) -> None:
    """Raise BadInput if `failures` kill all of the `ranks` workers in one step, unless `recovery` is "restart"."""
    lost: defaultdict[int, set[int]] = defaultdict(set)
    for failure in failures:
        if failure.kind in ENDING:
            lost[failure.step] |= set(failure.targets or (0,))
    for step, targets in lost.items():
        if recovery != "restart" and len(targets) >= ranks:
            raise BadInput(
                f"All {ranks} workers would be lost in step {step}, and --recovery {recovery} needs a survivor: "
                "name fewer ranks, or choose --recovery restart."
            )


def _is_fraction(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False
