"""Runs as they could have happened: killed, torn, rolled back, preempted, left, with more or fewer ranks; and wrong ones.

A run is played with a model of the truth: what every step leaves behind follows from the numbers of ranks that trained
it and all steps before it. The events are what a run would write; beside them stands what of it counted, and who needs
which commit. Nothing here asks the audit.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import xxhash

from holdfast.events import (
    Attempt,
    Commit,
    Detect,
    Done,
    Event,
    Judged,
    Launch,
    Open,
    Plan,
    Preempt,
    Preempted,
    Recover,
    Restart,
    Save,
    Seconds,
    Step,
    Strike,
    What,
)
from holdfast.geometry import Geometry
from holdfast.samples import Samples
from holdfast.stall import Stall

PLAN = Geometry(samples=83, batch=8, epochs=2, seed=11)  # 2 epochs of 10 windows, 3 samples are left over
NOON = 1.7e9
# Ways in which a run can be wrong from within: each writes what such a run would write.
WRONGS = (
    "abandoned branch restored",
    "abandoned branch found again",
    "fresh weights",
    "nothing trained",
    "one window not trained",
    "unprotected state",
    "split without a seed",
    "replicas apart",
    "window skipped",
    "window repeated",
    "commit too early",
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a store holds: a state, by the numbers of ranks that trained it, and whether its commit is on record."""

    step: int
    by: tuple[int, ...]
    saver: int
    recorded: bool


@dataclass(slots=True)
class Lived:
    """A run that was played: its files, and the truth about it."""

    files: defaultdict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    standing: dict[int, int] = field(default_factory=dict)  # of every step that counts, the attempt that trained it
    needed: set[tuple[int, int]] = field(default_factory=set)  # commits, by attempt and step, that something rests on
    pasts: dict[tuple[str, int, int], tuple[int, ...]] = field(default_factory=dict)  # of a rank's step in an attempt
    complete: bool = False
    was_wrong: bool = False
    now: float = NOON

    def write(self, who: str, what: What) -> None:
        self.now += 0.25
        self.files[who].append(Event(self.now, who, what))

    @property
    def events(self) -> list[Event]:
        """All of them, file by file."""
        return [event for who in sorted(self.files) for event in self.files[who]]

    def counts(self, event: Event) -> bool:
        """Whether this is a step that was not rolled back."""
        what = event.what
        return isinstance(what, Step) and self.standing.get(what.step) == what.attempt

    def twice(self) -> Counter[tuple[str, tuple[int, ...]]]:
        """How often each rank trained from each past."""
        return Counter((who, past) for (who, _, _), past in self.pasts.items())


def digest(*parts: object) -> str:
    return xxhash.xxh3_64_hexdigest(repr(parts).encode())


@cache
def trained(plan: Geometry, step: int, rank: int, world: int) -> Samples:
    """What a rank trains of a window; thousands of runs of one plan are played."""
    return Samples.of(plan.share(plan.position(step), rank, world))


def live(rng: random.Random, plan: Geometry = PLAN, wrong: str | None = None) -> Lived:
    """A run; with a wrong, it is wrong in this way if there was an opportunity."""
    return _Play(rng, plan, wrong).play()


class _Play:
    """The run as it goes."""

    def __init__(self, rng: random.Random, plan: Geometry, wrong: str | None) -> None:
        self.rng, self.plan, self.wrong = rng, plan, wrong
        self.run = Lived()
        self.every = rng.choice([1, 2, 3, 4, 7, 50])
        self.supervised = rng.random() < 0.8
        self.notes_loss = rng.random() < 0.7
        self.world = rng.randint(1, 4)
        self.number = 0
        self.store: list[Snapshot] = []
        self.aside: list[Snapshot] = []
        self.by: tuple[int, ...] = ()
        self.salt = ""  # of what is not protected, and not the same again
        self.misled: set[tuple[int, int]] = set()  # attempts and steps that trained nothing, or another window
        self.salts: dict[tuple[str, int, int], str] = {}
        self.supervisor_lives = False
        self.started = 0  # attempts, as the supervisor counts them: those whose start it has written down
        self.silent = False  # killed before it could write down a start
        self.again = rng.random() < 0.1  # started once more when all is done

    def play(self) -> Lived:
        for _ in range(self.rng.randint(0, 5)):
            if self._attempt(self.rng.choice(["kill", "kill", "kill", "preempt", "leave", "early"])) == "done":
                break
            if self.rng.random() < 0.3:
                self.world = self.rng.randint(1, 4)
        ending = self.rng.choices(["done", "kill", "leave"], [20, 1, 1])[0]
        if not self.run.complete:
            self._attempt(ending)
        if self.run.complete and self.again:
            self._attempt("done")
        salts: defaultdict[tuple[str, tuple[int, ...]], set[str]] = defaultdict(set)
        for (who, number, step), past in self.run.pasts.items():
            salts[who, past].add(self.salts[who, number, step])
        self.run.was_wrong |= any(len(each) > 1 for each in salts.values())
        self.run.was_wrong |= any((number, step) in self.misled for step, number in self.run.standing.items())
        return self.run

    # What an attempt does.

    def _attempt(self, ending: str) -> str:
        self.number += 1
        if ending == "kill" and self.supervised and self.rng.random() < 0.1:
            self._opens()  # and is killed, with its workers, before it can write down that it has started them
            self.silent = True
        else:
            self._launch()
        if ending == "early":
            self._die_early()
            return self._fail(ending)
        found = self._find()
        self._begin(found)
        start = found.step if found else 0
        end = self.plan.steps if ending == "done" else self.rng.randint(start, self.plan.steps)
        if ending in ("preempt", "leave", "kill") and end == self.plan.steps:
            end = max(start, end - 1)
        self._train(start, end, ending)
        return self._end(end, ending)

    def _launch(self) -> None:
        if not self.supervised:
            return
        self.started += 1
        if not self.supervisor_lives:
            self._opens()
            self.say("supervisor", Launch(self.started, self.world, argv=("train.py",)))
        else:
            newest = max((each.step for each in self.store), default=None)
            self.say("supervisor", Restart(self.started, self.world, newest=newest, left=3))

    def _opens(self) -> None:
        if not self.supervisor_lives:
            self.say("supervisor", Open(2, torn=self.rng.choice([0, 0, 17])))
        self.supervisor_lives = True

    def _die_early(self) -> None:
        """Killed before anything could be trained; every rank came so far or further."""
        found = self._find(quietly=True)
        for rank in range(self.world):
            told = self._beginning(rank, found)
            came_to = told[: self.rng.randint(0, len(told))]
            if found and not found.recorded and rank and not self._is_on_record(found):
                came_to = came_to[:-1]  # rank 0 says that it found one before any rank can restore it
            for what in came_to:
                self.say(f"rank-{rank}", what)
            if found and any(isinstance(what, Commit) for what in came_to):
                self._on_record(found)

    def _find(self, *, quietly: bool = False) -> Snapshot | None:
        """The newest good snapshot; bad ones are set aside, and never come back unless the run is wrong."""
        if not quietly and self.aside and self.wrong in ("abandoned branch restored", "abandoned branch found again"):
            came_back = self.rng.choice(self.aside)
            abandoned = came_back.by != self.by[: came_back.step] or came_back.step > len(self.by)
            if abandoned and came_back.step > 0:
                self.run.was_wrong = True
                recorded = self.wrong == "abandoned branch restored"
                self.aside.clear()
                return Snapshot(came_back.step, came_back.by, came_back.saver, recorded)
        while not quietly and self.store and self.rng.random() < 0.2:
            self.aside.append(self.store.pop())
        return self.store[-1] if self.store else None

    def _beginning(self, rank: int, found: Snapshot | None) -> list[What]:
        begin: list[What] = [Open(2, torn=self.rng.choice([0, 0, 0, 40]))]
        begin.append(Attempt(self.number, self.world, rank, 1000 + self.number))
        if rank == 0 and found and not found.recorded:
            begin.append(Commit(self.number, found.step, 4096, found=True, state=self._committed(found)))
        data = digest("data", rank if self.wrong == "split without a seed" else "")
        return [*begin, self._plan(data), self._recover(found)]

    def _plan(self, data: str) -> Plan:
        plan = self.plan
        how = (self.every, "overlapped", digest("config", self.plan))
        return Plan(self.number, plan.samples, plan.batch, plan.epochs, plan.seed, *how, data=data)

    def _recover(self, found: Snapshot | None) -> Recover:
        at = self.plan.position(found.step if found else 0)
        rng = "restored" if found and found.saver == self.world else "keyed"
        state = self._committed(found) if found else None
        if found and self.wrong == "fresh weights":
            state, self.salt, self.run.was_wrong = digest("fresh", self.number), "fresh", True
        return Recover(self.number, found.step if found else None, *at, rng, 0.125, state=state)

    def _begin(self, found: Snapshot | None) -> None:
        self.salt = ""
        for rank in range(self.world):
            for what in self._beginning(rank, found):
                self.say(f"rank-{rank}", what)
        self.run.was_wrong |= self.wrong == "split without a seed" and self.world > 1
        if found and not found.recorded:
            self._on_record(found)
            self._need(found.step, self.number)
        elif found:
            self._need(found.step, None)
        if self.wrong == "unprotected state" and found:
            self.salt = f"unprotected {self.number}"
        self.by = found.by if found else ()
        self.run.standing = {step: number for step, number in self.run.standing.items() if step < len(self.by)}
        if found is None:
            self.store.clear()

    def _is_on_record(self, found: Snapshot) -> bool:
        return any(each.recorded and each.step == found.step for each in self.store)

    def _on_record(self, found: Snapshot) -> None:
        self.store = [each for each in self.store if each.step != found.step]
        self.store.append(Snapshot(found.step, found.by, found.saver, True))

    def _need(self, step: int, found_in: int | None) -> None:
        commits = [
            event.what
            for event in self.run.files["rank-0"]
            if isinstance(event.what, Commit) and event.what.step == step and found_in in (None, event.what.attempt)
        ]
        if commits:
            self.run.needed.add((commits[-1].attempt, step))

    def _train(self, start: int, end: int, ending: str) -> None:
        waiting: list[Snapshot] = []
        fresh = not self.store and start == 0
        idle = self.rng.randrange(start + 1, end) if end - start > 1 else -1
        skipped = self.rng.randrange(start, end - 1) if end - start > 1 else -1
        for step in range(start, end):
            if (step % self.every == 0 and step > start) or (fresh and step == start):
                waiting.append(Snapshot(step, self.by, self.world, False))
            self._commit_some(waiting)
            self._step(step, idle=step == idle, skipped=step == skipped)
        if ending == "kill" and end < self.plan.steps:
            self._half_a_step(end)
        if ending in ("preempt", "done", "leave"):
            if ending != "leave" and end != start:
                waiting.append(Snapshot(end, self.by, self.world, False))
            self._commit_some(waiting, every=True)
        elif waiting and self.rng.random() < 0.5:  # durable, and killed before it could say so
            self._keep(waiting[0])
        if self.wrong == "commit too early" and ending == "kill":
            self.run.was_wrong = True
            self.say("rank-0", Commit(self.number, end + 3, 4096, 0.5, state=digest("early")))

    def _commit_some(self, waiting: list[Snapshot], *, every: bool = False) -> None:
        while waiting and (every or self.rng.random() < 0.6):
            snapshot = waiting.pop(0)
            self.say("rank-0", Save(self.number, snapshot.step, "overlapped", 4096, Stall(waited=0.125)))
            state = self._committed(snapshot)
            self.say("rank-0", Commit(self.number, snapshot.step, 4096, 0.5, state=state))
            self._keep(Snapshot(snapshot.step, snapshot.by, snapshot.saver, True))

    def _keep(self, snapshot: Snapshot) -> None:
        self.store = [each for each in self.store if each.step < snapshot.step][-2:]
        self.store.append(snapshot)

    def _step(self, step: int, *, idle: bool, skipped: bool) -> None:
        by = (*self.by, self.world)
        for rank in range(self.world):
            self._report(step, rank, by, idle=idle, skipped=skipped)
        self.by = by
        self.run.standing[step] = self.number

    def _half_a_step(self, step: int) -> None:
        """Some ranks had reported their share when others were killed."""
        by = (*self.by, self.world)
        ranks = self.rng.sample(range(self.world), self.rng.randint(0, self.world - 1))
        for rank in ranks:
            self._report(step, rank, by, idle=False, skipped=False)
        if ranks:
            self.run.standing[step] = self.number

    def _report(self, step: int, rank: int, by: tuple[int, ...], *, idle: bool, skipped: bool) -> None:
        at = self.plan.position(step)
        nothing = self.wrong == "nothing trained" or (self.wrong == "one window not trained" and idle)
        past = by[:-1] if self.wrong == "one window not trained" and idle else by
        past = () if self.wrong == "nothing trained" else past
        apart = rank if self.wrong == "replicas apart" and step == self.plan.steps - 1 else ""
        shared, own = digest("shared", past, self.salt, apart), digest("own", past, self.salt, rank)
        shown = step + 1 if skipped and self.wrong == "window skipped" else step
        shown = step - 1 if skipped and self.wrong == "window repeated" and step else shown
        self.run.was_wrong |= apart != "" and self.world > 1
        if nothing or shown != step:
            self.misled.add((self.number, step))
        self.run.pasts[f"rank-{rank}", self.number, step] = by
        self.salts[f"rank-{rank}", self.number, step] = self.salt
        self.say(
            f"rank-{rank}",
            Step(
                *(self.number, self.world, rank, *at, step),
                trained(self.plan, shown, rank, self.world),
                Seconds(0.125, 0.5, 0.0),
                state=shared + own,
                reduced=0 if nothing else int(self.world > 1),
                stepped=0 if nothing else 1,
                loss=len(past) + rank / 8 if self.notes_loss else None,
            ),
        )

    # How an attempt ends.

    def _end(self, end: int, ending: str) -> str:
        ranks = [f"rank-{rank}" for rank in range(self.world)]
        if ending == "preempt":
            self.supervisor(Preempt(self.started))
            for who in ranks:
                self.say(who, Preempted(self.number, end))
            self.judge("preempted")
        elif ending == "done":
            for who in ranks:
                self.say(who, Done(self.number, end))
            self.judge("completed")
            self.run.complete = True
            self._need(end, None)
        elif ending == "leave":
            self.judge("completed")
        else:
            return self._fail(ending)
        return ending

    def _fail(self, ending: str) -> str:
        rank = self.rng.randrange(self.world)
        if self.rng.random() < 0.3:
            self.say(f"injected-{rank}", Strike(self.number, len(self.by), "kill", rank))
        if self.supervised and (self.silent or self.rng.random() < 0.2):  # the supervisor was killed, too
            self.supervisor_lives = self.silent = False
            return ending
        self.supervisor(Detect(self.started, rank, rank, "signal", "killed", exit=-9, signal="SIGKILL"))
        if self.supervised and self.rng.random() < 0.1:
            self.judge("gave-up")
        return ending

    def judge(self, word: str) -> None:
        self.supervisor(Judged(word, self.started, "so it was"))
        self.supervisor_lives = False

    def supervisor(self, what: What) -> None:
        if self.supervised:
            self.say("supervisor", what)

    def say(self, who: str, what: What) -> None:
        self.run.write(who, what)

    def _committed(self, snapshot: Snapshot) -> str:
        return digest("committed", snapshot.by)


def changed(events: Sequence[Event], which: Callable[[Event], bool], **fields: object) -> list[Event]:
    """The events with these fields in those that are meant; at least one is."""
    assert any(map(which, events))
    return [each._replace(what=each.what._replace(**fields)) if which(each) else each for each in events]  # type: ignore[arg-type]
