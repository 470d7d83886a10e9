"""Runs the tasks of a simulated cluster, one at a time, in an order that follows from one seed.

A task is a thread, so that the product's own code can run in it. It runs until it waits: each simulated operation does.
The task whose wait ends first, by the simulated clock, runs next. All random numbers come from one generator, so that
the same seed always gives the same order.
"""

import heapq
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

TICK = 0.002  # seconds that most operations take, on average
KEPT = 2000  # operations at the end of a schedule, which a replay shows
OPERATIONS = 2_000_000  # of a schedule; one that ends has far fewer


class Dead(BaseException):
    """Raised in the tasks of a process that was killed; it does nothing more, whatever it catches or cleans up."""


class Violation(Exception):
    """A schedule after which something does not hold that must always hold."""


@dataclass(slots=True, eq=False)
class Process:
    """A simulated process on a node. It may be killed, or paused until a later time."""

    name: str
    node: int
    is_dead: bool = False
    paused_until: float = 0.0


@dataclass(slots=True, eq=False)
class Task:
    """A thread of a simulated process."""

    process: Process
    function: Callable[[], None]
    thread: "_Thread"
    polls: float = 0.0  # seconds of its last wait in a row of short ones
    seen: int = -1  # the number of changes in the world when it last looked
    turn: int = 0  # the number of its next turn


@dataclass(slots=True, eq=False)
class World:
    """The clock, the tasks and the random numbers of one schedule."""

    seed: int
    now: float = 0.0
    changes: int = 0  # counts what a task that polls may be waiting for
    trace: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT))
    errors: list[BaseException] = field(default_factory=list)
    _is_over: bool = False
    _operations: int = 0
    _waiting: list[tuple[float, int, Task]] = field(default_factory=list)
    _current: Task | None = None
    _limit: float = float("inf")
    _done: threading.Lock = field(default_factory=threading.Lock)
    rng: random.Random = field(init=False)
    _digest: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._done.acquire()

    @property
    def digest(self) -> str:
        """A digest of all operations so far, with their times; equal for equal schedules."""
        return str(self._digest.hexdigest())

    @property
    def is_endless(self) -> bool:
        """True if the tasks still did something after the last operation that the schedule may have."""
        return self._operations >= OPERATIONS

    @property
    def process(self) -> Process:
        """The process of the task that runs now."""
        assert self._current is not None
        return self._current.process

    def spawn(self, process: Process, function: Callable[[], None], after: float = 0.0) -> None:
        """Start a task of `process` in `after` seconds."""
        task = Task(process, function, _idle.pop() if _idle else _Thread())
        task.thread.work = (self, task)
        self._push(self.now + after, task)

    def record(self, line: str) -> None:
        """Add a line to the trace."""
        text = f"{self.now:11.4f} {self._current.process.name if self._current else '-'}: {line}"
        self._operations += 1
        self._digest.update(text.encode())
        self.trace.append(text)

    def sleep(self, seconds: float) -> None:
        """Let other tasks run for `seconds` of the simulated clock; raise Dead if the process is killed meanwhile."""
        task = self._current
        assert task is not None
        if self._is_over or task.process.is_dead:
            raise Dead
        self._push(self.now + seconds, task)
        following = self._next()
        if following is not task:
            self._hand_to(following)
            task.thread.lock.acquire()
        if self._is_over or task.process.is_dead:
            raise Dead

    def wait(self, seconds: float) -> "Wait":
        """Return a wait of the task that runs now, which another task may end before `seconds` have passed."""
        assert self._current is not None
        return Wait(self, self._current, seconds)

    def poll(self, seconds: float) -> None:
        """Wait as a task does that looks again and again: the longer, the longer nothing has changed."""
        task = self._current
        assert task is not None
        task.polls = min(2 * task.polls, 0.5) if task.seen == self.changes and task.polls else seconds
        task.seen = self.changes
        self.sleep(max(seconds, task.polls) * self.rng.uniform(1, 1.2))

    def latency(self) -> float:
        """Return the seconds that an operation takes this time: mostly few, at times many."""
        if self.rng.random() < 0.02:
            return self.rng.choice((0.05, 0.5, 5.0)) * self.rng.random()
        return self.rng.expovariate(1 / TICK)

    def run(self, limit: float) -> None:
        """Run all tasks until they have ended, or until the simulated time `limit`; then kill the rest."""
        self._limit = limit
        try:
            self._run()
        finally:  # also if a signal interrupts this: what a task does later must not disturb the next schedule
            self._is_over, self._limit = True, float("inf")
        self._run()

    def stop(self) -> None:
        """End the schedule now: after a violation, nothing that follows is worth its time."""
        self._limit = self.now

    def _run(self) -> None:
        following = self._next()
        if following is not None:
            following.thread.lock.release()
            self._done.acquire()
        self._current = None

    def _push(self, when: float, task: Task) -> None:
        self._operations += 1
        task.turn = self._operations
        heapq.heappush(self._waiting, (when, task.turn, task))

    def _next(self) -> Task | None:
        """Return the task that runs next, and set the clock; None if none is left, or the schedule has to end."""
        while self._waiting and (self._is_over or not self.is_endless):
            when, number, task = self._waiting[0]
            if when > self._limit:
                return None
            heapq.heappop(self._waiting)
            if number != task.turn:
                continue  # it was woken before
            if task.process.paused_until > when and not (task.process.is_dead or self._is_over):
                heapq.heappush(self._waiting, (task.process.paused_until, number, task))
                continue
            self.now, self._current = max(self.now, when), task
            return task
        return None

    def _hand_to(self, task: Task | None) -> None:
        (task.thread.lock if task else self._done).release()

    def _end(self, error: BaseException | None) -> None:
        if error is not None and not self._is_over:
            self.errors.append(error)
        self._hand_to(self._next())


@dataclass(slots=True, eq=False)
class Wait:
    """A wait of `task`, which ends after `seconds`, or when another task calls `end`."""

    world: World
    task: Task
    seconds: float
    _is_over: bool = False

    def run(self) -> None:
        if not self._is_over:
            self.world.sleep(self.seconds)
        self._is_over = True

    def end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self.world._push(self.world.now, self.task)


class _Thread(threading.Thread):
    """A thread that runs one task after another, each when its lock is released."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="simulated")
        self.lock = threading.Lock()
        self.lock.acquire()
        self.work: tuple[World, Task] | None = None
        self.start()

    def run(self) -> None:
        while True:
            self.lock.acquire()
            assert self.work is not None
            world, task = self.work
            self.work, error = None, None
            try:
                if not (world._is_over or task.process.is_dead):
                    task.function()
            except Dead:
                pass
            except BaseException as raised:
                error = raised
            _idle.append(self)
            world._end(error)
            del world, task, error


_idle: list[_Thread] = []
