"""One life of a supervisor: what it wrote between two openings of its file, and whether in an order in which one works.

    open  [launch  {{detect}  detect  restart}  {detect}  [preempt]  [detect]]  [verdict]

Where others went on without a worker that failed, nothing is started again: whether they did, the ranks tell. A life
may end anywhere: a supervisor may be killed. It writes every line before it goes on, so only its last are lost.
"""

from collections import defaultdict
from collections.abc import Sequence

from holdfast.events import Detect, Judged, Launch, Malformed, Open, Other, Preempt, Restart, Scale, What


class Supervision:
    """What one supervisor wrote from one opening of its file to the next."""

    def __init__(self, who: str, opened: Open | None) -> None:
        self.who = who
        self.argv: Sequence[str] | None = None
        self.source: str | None = None  # where the run's first weights come from
        self.weights: str | None = None  # their digest
        self.extends = False
        self.changed: Sequence[str] = ()  # names of arguments of the script that may differ from those before
        self.launches: list[int] = []  # numbers of attempts
        self.workers: dict[int, int] = {}  # of each, where there is one node
        self.newest: dict[int, int] = {}  # by attempts that were started again: the newest snapshot that was seen
        self.failed: defaultdict[int, list[int]] = defaultdict(list)  # attempts of which workers failed, and which
        self.detects: list[Detect] = []
        self.asked: set[int] = set()  # attempts that were to stop
        self.scales: list[Scale] = []
        self.verdicts: list[Judged] = []
        self.wrong: str | None = None if opened else f"{who} wrote before it had opened its history"

    @property
    def is_alone(self) -> bool:
        """Whether it was the only one of its run: then it alone counts the attempts."""
        return self.who == "supervisor"

    @property
    def may_have_started_more(self) -> bool:
        """Whether it may have been killed after a start that it did not write down: it writes first who failed."""
        if self.verdicts or not self.launches:
            return not self.verdicts
        return self.launches[-1] in self.failed and self.launches[-1] not in self.asked

    def take(self, what: What) -> bool:
        """Add what it wrote next, if that is what supervisors write."""
        match what:
            case Launch() | Restart():
                self._start(what)
            case Detect(attempt=number, rank=rank):
                self._must_run(number, "a failure")
                if rank < -1:
                    self._complain(f"{self.who} tells of a failure of rank {rank}, which nobody is")
                self.failed[number].append(rank)
                self.detects.append(what)
            case Preempt(attempt=number):
                self._must_run(number, "a wish to stop")
                self.asked.add(number)
            case Scale(attempt=number):
                self._must_run(number, "a wish for more or fewer workers")
                self.scales.append(what)
            case Judged():
                self._judge(what)
            case _:
                return isinstance(what, Other | Malformed)
        return True

    def _start(self, what: Launch | Restart) -> None:
        self._must_not_have_judged(f"the start of attempt {what.attempt}")
        if isinstance(what, Launch):
            self.source, self.weights = what.source, what.weights
            self.argv, self.extends, self.changed = what.argv, what.extends, what.changed
            if self.launches:
                self._complain(f"{self.who} launched attempt {what.attempt} after it had started {self.launches[-1]}")
        else:
            self._restart(what.attempt)
            self.newest |= {} if what.newest is None else {what.attempt: what.newest}
        self.launches.append(what.attempt)
        if self.is_alone:
            self.workers[what.attempt] = what.workers

    def _restart(self, number: int) -> None:
        """It starts the workers again after it has seen one fail, unless it was asked to stop, and counts that."""
        last = self.launches[-1] if self.launches else None
        if last is None:
            self._complain(f"{self.who} started attempt {number} again and had launched none")
        elif last not in self.failed:
            self._complain(f"{self.who} started attempt {number} and had not seen attempt {last} fail")
        elif last in self.asked:
            self._complain(f"{self.who} started attempt {number} after it was asked to stop")
        elif number != last + 1 and (self.is_alone or number <= last):
            self._complain(f"{self.who} started attempt {number} after attempt {last}")

    def _judge(self, what: Judged) -> None:
        if what.verdict == "completed" and not self.launches:
            self._complain(f"{self.who} says {what.verdict!r} and has started nothing")
        self.verdicts.append(what)

    def _must_run(self, number: int, what: str) -> None:
        """This is about the attempt that it has started last."""
        self._must_not_have_judged(f"{what} in attempt {number}")
        if number not in self.launches[-1:]:
            started = f"attempt {self.launches[-1]} last" if self.launches else "none"
            self._complain(f"{self.who} tells of {what} in attempt {number} and had started {started}")

    def _must_not_have_judged(self, what: str) -> None:
        if self.verdicts:
            self._complain(f"{self.who} tells of {what} after its verdict")

    def _complain(self, why: str) -> None:
        self.wrong = self.wrong or why
