"""Finds nodes that are slower than the other nodes, from the times of their latest steps. No I/O.

The workers of one node are compared with each other (`stragglers`). A node that is slow as a whole, because it is too
hot for example, has no worker that is slower than the others. So the nodes also tell each other about once a second how
long their latest steps took: three numbers, for any number of workers.

The nodes do not look at the same moment. When steps become longer on all nodes, one node may say so a look or two
before the others. So a node counts as slow only if it was slow in several looks in a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import NamedTuple

from holdfast.supervise.stragglers import FIRST, LATE, LEAST, RATIO, OwnTime, SlowSteps

WINDOW = 40  # latest steps of a node that are compared
SLOW_STEPS = 32  # of these, in which a slow node is slower than the others
LOOKS = 4  # looks in a row at which a slow node is slow


class NodeSteps(NamedTuple):
    """The own times of the latest steps of a node, of which each is the median of its workers."""

    until: int  # the latest step, plus 1
    shortest: float  # seconds; `SLOW_STEPS` of `WINDOW` steps took at least as long
    usual: float  # the median, in seconds


def latest_steps(own_times: Sequence[OwnTime], reached: int) -> NodeSteps | None:
    """Return the own times of the latest steps before step `reached`; None if there are too few.

    `own_times` has a function for each training worker of the node."""

    def own_time(step: int) -> float | None:
        known = [value for worker in own_times if (value := worker(step)) is not None]
        # More than half of the workers have to be slow: a single slow worker makes no node slow.
        return median_low(known) if known and len(known) == len(own_times) else None

    known = (
        end for end in range(reached, max(reached - LATE, FIRST + WINDOW - 1), -1) if own_time(end - 1) is not None
    )
    if (until := next(known, None)) is None:
        return None
    times = [value for step in range(until - WINDOW, until) if (value := own_time(step)) is not None]
    if len(times) < WINDOW:
        return None
    return NodeSteps(until, sorted(times)[WINDOW - SLOW_STEPS], median(times))


@dataclass(slots=True)
class _Node:
    """The latest steps of one node, compared with the other nodes, and its present period of slow steps."""

    steps: NodeSteps
    ratio: float = 1.0
    looks: int = 0  # in a row at which the node was slow
    since: int = 0  # the beginning of the period, if there is one
    seconds: float = 0.0
    reported: int = 0

    def add(self, steps: NodeSteps, others: float) -> None:
        """Compare `steps` with the median own time of the other nodes."""
        new, self.steps = steps.until - self.steps.until, steps
        if new <= 0:
            return
        self.ratio = steps.usual / others if others > 0 else 1.0
        excess = max(0.0, steps.usual - others)
        if self.is_slow:
            self.seconds += excess * new
        elif steps.shortest >= RATIO * others and steps.shortest - others >= LEAST:
            if self.looks == 0:
                self.since, self.seconds, new = steps.until - SLOW_STEPS, 0.0, SLOW_STEPS
            self.seconds += excess * new
            self.looks += 1
        else:
            self.looks = 0

    @property
    def is_slow(self) -> bool:
        return self.looks >= LOOKS

    @property
    def is_due(self) -> bool:
        """True at the first report of a period, and each time the period has become twice as long."""
        return self.is_slow and self.steps.until - self.since >= 2 * self.reported

    def period(self, node: int, *, is_over: bool) -> SlowSteps:
        self.reported = self.steps.until - self.since
        return SlowSteps(node, self.since, self.steps.until, self.ratio, self.seconds, is_over)


class SlowNodes:
    """A detector of slow nodes among the nodes of a run."""

    def __init__(self) -> None:
        self._nodes: dict[int, _Node] = {}

    def look(self, latest: Mapping[int, NodeSteps]) -> list[SlowSteps]:
        """Compare the `latest` steps of all nodes, by number; return what to report, with nodes in place of seats."""
        reports = self._end([node for node in self._nodes if node not in latest or len(latest) < 2])
        for number, steps in latest.items() if len(latest) > 1 else ():
            others = median(other.usual for node, other in latest.items() if node != number)
            self._nodes.setdefault(number, _Node(steps)).add(steps, others)
        reports += self._end([number for number, node in self._nodes.items() if node.is_slow and node.ratio < RATIO])
        return reports + [node.period(number, is_over=False) for number, node in self._nodes.items() if node.is_due]

    def end(self) -> list[SlowSteps]:
        """Forget all nodes, because their workers have exited; return the final report of each slow one."""
        return self._end([*self._nodes])

    def _end(self, numbers: list[int]) -> list[SlowSteps]:
        ended = [(number, self._nodes.pop(number)) for number in numbers]
        return [node.period(number, is_over=True) for number, node in ended if node.is_slow]
