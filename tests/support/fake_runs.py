"""Plays random runs: killed, torn, rolled back, preempted, left, with more or fewer ranks; and runs that are wrong.

Some recover live: members are lost, in a step or before it, and the others continue until replacements join.

A run is played with a model of the truth: the state after a step follows from the ranks that trained it and all steps
before it. The events are what such a run would write. Beside them stands which of its steps count, and which commits are
needed. Nothing here uses the audit.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeAlias

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
    Regroup,
    Restart,
    Save,
    Seconds,
    Step,
    Stopped,
    Strike,
    What,
)
from holdfast.sampler.digest import Samples
from holdfast.sampler.plan import SamplePlan
from holdfast.stall import Stall

PLAN = SamplePlan(samples=83, batch=8, epochs=2, seed=11)  # 2 epochs of 10 windows, 3 samples are left over
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
    "loss kept quiet",
    "joined with another state",
)
By: TypeAlias = tuple[object, ...]  # of every step: how many ranks trained it, or what else came of it


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a store holds: a state, by the numbers of ranks that trained it, and whether its commit is on record."""

    step: int
    by: By
    saver: tuple[int, int]  # the number of ranks, and of those in a group that trains the same samples
    recorded: bool


@dataclass(slots=True)
class FakeRun:
    """A run that was played: its files, and the truth about it."""

    files: defaultdict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    standing: dict[int, int] = field(default_factory=dict)  # of every step that counts, the attempt that trained it
    needed: set[tuple[int, int]] = field(default_factory=set)  # commits, by attempt and step, that something rests on
    pasts: dict[tuple[str, int, int], By] = field(default_factory=dict)  # of a rank's step in an attempt
    void: list[Event] = field(default_factory=list)  # steps of lost members, that the others finished without them
    vouched: set[tuple[str, int, int]] = field(default_factory=set)  # of a rank's step in an attempt: it may be lacking
    skipped: set[tuple[int, int]] = field(default_factory=set)  # attempts and steps that nothing came of
    failed_to_join: set[int] = field(default_factory=set)  # attempts, as the supervisor counts, of which only it knows
    lacking: int = 0  # samples that are declared missing, of steps that count
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
        return isinstance(what, Step) and self.standing.get(what.step) == what.attempt and event not in self.void

    def is_due(self, event: Event) -> bool:
        """Whether this is a step that nobody else can vouch for."""
        what = event.what
        vouched = isinstance(what, Step) and (event.who, what.attempt, what.step) in self.vouched
        return isinstance(what, Step) and not vouched and event not in self.void

    def twice(self) -> Counter[tuple[str, By]]:
        """How often each rank trained from each past."""
        return Counter((who, past) for (who, _, _), past in self.pasts.items())


def digest(*parts: object) -> str:
    return xxhash.xxh3_64_hexdigest(repr(parts).encode())


@cache
def trained(plan: SamplePlan, step: int, rank: int, world: int) -> Samples:
    """What a rank trains of a window; thousands of runs of one plan are played."""
    return Samples.of(plan.share(plan.position(step), rank, world))


def random_run(rng: random.Random, plan: SamplePlan = PLAN, wrong: str | None = None) -> FakeRun:
    """A run; with a wrong, it is wrong in this way if there was an opportunity."""
    return _Play(rng, plan, wrong).play()


def stopped(rng: random.Random, *, goes_on: bool = False) -> FakeRun:
    """A run that its script stops before its planned end; one that goes on all the same is wrong."""
    play = _Play(rng, PLAN, None)
    play._attempt("stop")
    if goes_on:
        play._attempt("done")
    return play.run


def preempted(rng: random.Random) -> FakeRun:
    """A supervised run that was asked to stop, and did."""
    play = _Play(rng, PLAN, None)
    play.supervised = True
    play._attempt("preempt")
    return play.run


def extended(rng: random.Random, *, stops: bool = False) -> FakeRun:
    """A run of one epoch, trained to its end or stopped by its script, and then extended to the whole plan."""
    play = _Play(rng, replace(PLAN, epochs=1), None)
    play._attempt("stop" if stops else "done")
    play.plan, play.extends = PLAN, True
    if rng.random() < 0.5:
        play._attempt("kill")
    play._attempt("done")
    return play.run


class _Play:
    """The run as it goes."""

    def __init__(self, rng: random.Random, plan: SamplePlan, wrong: str | None) -> None:
        self.rng, self.plan, self.wrong = rng, plan, wrong
        self.extends = False
        self.run = FakeRun()
        self.every = rng.choice([1, 2, 3, 4, 7, 50])
        self.supervised = rng.random() < 0.8
        self.notes_loss = rng.random() < 0.7
        self.world = rng.randint(1, 4)
        self.number = 0
        self.store: list[Snapshot] = []
        self.aside: list[Snapshot] = []
        self.passed_over: list[int] = []  # steps of those that were set aside in this attempt
        self.seed = 0
        self.by: By = ()
        self.recovery = rng.choice(["restart", "restart", "forward", "forward", "skip", "replay"])
        self.group = self._any_group()
        self.members: tuple[int, ...] = ()
        self.basis: tuple[int, ...] = ()  # those whom the window is divided among
        self.membership = self.division = 0
        self.shared = ""  # the state that the last step left, as all ranks tell it
        self.missing: dict[tuple[int, int], int] = {}  # samples of steps of attempts
        self.salt = ""  # of what is not protected, and not the same again
        self.misled: set[tuple[int, int]] = set()  # attempts and steps that trained nothing, or another window
        self.salts: dict[tuple[str, int, int], str] = {}
        self.supervisor_lives = False
        self.started = 0  # attempts, as the supervisor counts them: those whose start it has written down
        self.silent = False  # killed before it could write down a start
        self.again = rng.random() < 0.1  # started once more when all is done

    def play(self) -> FakeRun:
        for _ in range(self.rng.randint(0, 5)):
            if self._attempt(self.rng.choice(["kill", "kill", "kill", "preempt", "leave", "early"])) == "done":
                break
            if self.rng.random() < 0.3:
                self.world = self.rng.randint(1, 4)
                self.group = self._any_group()
        ending = self.rng.choices(["done", "kill", "leave"], [20, 1, 1])[0]
        if not self.run.complete:
            self._attempt(ending)
        if self.run.complete and self.again:
            self._attempt("done")
        self.run.lacking = sum(self.missing.get((number, step), 0) for step, number in self.run.standing.items())
        salts: defaultdict[tuple[str, By], set[str]] = defaultdict(set)
        for (who, number, step), past in self.run.pasts.items():
            salts[who, past].add(self.salts[who, number, step])
        self.run.was_wrong |= any(len(each) > 1 for each in salts.values())
        self.run.was_wrong |= any((number, step) in self.misled for step, number in self.run.standing.items())
        return self.run

    def _any_group(self) -> int:
        """How many ranks train the same samples, with tensor parallelism; most runs have none."""
        sizes = [size for size in range(2, self.world + 1) if self.world % size == 0]
        return self.rng.choice([1, 1, *sizes]) if self.recovery == "restart" else 1

    # What an attempt does.

    def _attempt(self, ending: str) -> str:
        self.number += 1
        if not any(isinstance(event.what, Commit | Step) for event in self.run.files.get("rank-0", ())):
            self.seed = self.number  # nothing was trained with any yet
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
        if ending in ("preempt", "leave", "kill", "stop") and end == self.plan.steps:
            end = max(start, end - 1)
        if ending == "stop":
            end = max(end, start + 1)  # nobody stops before anything is trained
        self._train(start, end, ending)
        return self._end(end, ending)

    def _launch(self) -> None:
        if not self.supervised:
            return
        self.started += 1
        if not self.supervisor_lives:
            self._opens()
            self.say("supervisor", Launch(self.started, self.world, argv=("train.py",), extends=self.extends))
        else:
            newest = max((each.step for each in self.store), default=None)
            self.say("supervisor", Restart(self.started, self.world, newest=newest, left=3))

    def _opens(self) -> None:
        if not self.supervisor_lives:
            self.say("supervisor", Open(2, torn=self.rng.choice([0, 0, 17])))
        self.supervisor_lives = True

    def _die_early(self) -> None:
        """Killed before anything could be trained; every rank came so far or further."""
        found, was_wrong = self._find(quietly=True), self.run.was_wrong
        for rank in range(self.world):
            told = self._beginning(rank, found)
            came_to = told[: self.rng.randint(0, len(told))]
            if found and not found.recorded and rank and not self._is_on_record(found):
                came_to = came_to[:-1]  # rank 0 says that it found one before any rank can restore it
            for what in came_to:
                self.say(f"rank-{rank}", what)
            if found and any(isinstance(what, Commit) for what in came_to):
                self._on_record(found)
            was_wrong |= self.run.was_wrong and any(isinstance(what, Recover) for what in came_to)
        self.run.was_wrong = was_wrong  # what was not written is not wrong

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
        self.passed_over = []
        while not quietly and self.store and self.rng.random() < 0.2:
            self.aside.append(self.store.pop())
            self.passed_over.append(self.aside[-1].step)
        return self.store[-1] if self.store else None

    def _beginning(self, rank: int, found: Snapshot | None) -> list[What]:
        begin: list[What] = [Open(2, torn=self.rng.choice([0, 0, 0, 40]))]
        begin.append(Attempt(self.number, self.world, rank, 1000 + self.number, self.seed))
        if rank == 0 and found and not found.recorded:
            begin.append(Commit(self.number, found.step, 4096, found=True, state=self._committed(found)))
        data = digest("data", rank if self.wrong == "split without a seed" else "")
        return [*begin, self._plan(data), self._recover(found)]

    def _plan(self, data: str) -> Plan:
        plan = self.plan
        how = (self.every, "overlapped", digest("config", plan.samples, plan.batch, plan.seed))
        lasts = (plan.samples, plan.batch, plan.epochs, plan.seed)
        return Plan(self.number, *lasts, *how, data=data, extends=self.extends, tensor_parallel=self.group)

    def _recover(self, found: Snapshot | None) -> Recover:
        at = self.plan.position(found.step if found else 0)
        rng = "restored" if found and found.saver == (self.world, self.group) else "keyed"
        state = self._committed(found) if found else None
        if found and self.wrong == "fresh weights":
            state, self.salt, self.run.was_wrong = digest("fresh", self.number), "fresh", True
        told = self._left(found.by if found else ()) + digest("own")
        bad = tuple({"name": f"step-{step:08d}/", "why": "changed since"} for step in self.passed_over)
        back = found.step if found else None
        return Recover(self.number, back, *at, rng, 0.125, bad, state=state, fingerprint=told)

    def _begin(self, found: Snapshot | None) -> None:
        self.salt = ""
        self.shared = self._left(found.by if found else ())
        self.members = self.basis = tuple(range(self.world))
        self.membership = self.division = 0
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
            for event in self.run.events
            if isinstance(event.what, Commit) and event.what.step == step and found_in in (None, event.what.attempt)
        ]
        if commits:
            self.run.needed.add((max(commit.attempt for commit in commits), step))

    def _train(self, start: int, end: int, ending: str) -> None:
        waiting: list[Snapshot] = []
        fresh = not self.store and start == 0
        idle = self.rng.randrange(start + 1, end) if end - start > 1 else -1
        skipped = self.rng.randrange(start, end - 1) if end - start > 1 else -1
        for step in range(start, end):
            if (step % self.every == 0 and step > start) or (fresh and step == start):
                waiting.append(Snapshot(step, self.by, (len(self.members), self.group), False))
            self._commit_some(waiting)
            first = self.members[0]
            come_to = self._change(step, start) if self.recovery != "restart" else None
            if self.members[0] != first:
                waiting.clear()  # they were on their way, and died with whoever saved them
            self._step(step, idle=step == idle, skipped=step == skipped, come_to=come_to)
            self._divide(self.members)
        if ending == "kill" and end < self.plan.steps:
            self._half_a_step(end)
        if ending in ("preempt", "done", "leave", "stop"):
            if ending != "leave" and end != start:
                waiting.append(Snapshot(end, self.by, (len(self.members), self.group), False))
            self._commit_some(waiting, every=True, stops=end if ending == "stop" else None)
        elif waiting and self.rng.random() < 0.5:  # durable, and killed before it could say so
            self._keep(waiting[0])
        if self.wrong == "commit too early" and ending == "kill":
            self.run.was_wrong = True
            self.say(self._saver, Commit(self.number, end + 3, 4096, 0.5, state=digest("early")))

    def _commit_some(self, waiting: list[Snapshot], *, every: bool = False, stops: int | None = None) -> None:
        while waiting and (every or self.rng.random() < 0.6):
            snapshot = waiting.pop(0)
            self.say(self._saver, Save(self.number, snapshot.step, "overlapped", 4096, Stall(waited=0.125)))
            state = self._committed(snapshot)
            stop = snapshot.step == stops
            self.say(self._saver, Commit(self.number, snapshot.step, 4096, 0.5, state=state, stops=stop))
            self._keep(Snapshot(snapshot.step, snapshot.by, snapshot.saver, True))

    def _keep(self, snapshot: Snapshot) -> None:
        self.store = [each for each in self.store if each.step < snapshot.step][-2:]
        self.store.append(snapshot)

    @property
    def _saver(self) -> str:
        return f"rank-{self.members[0]}"

    def _trained_by(self) -> object:
        """What comes of a step depends on how many trained it, and on who was left of them: sums round otherwise."""
        whole = self.world if self.group == 1 else f"{self.world} in groups of {self.group}"
        return whole if len(self.basis) == self.world else (self.number, self.division)

    def _divide(self, members: tuple[int, ...]) -> None:
        self.division = self.division if members == self.basis else self.membership
        self.basis = members

    def _step(self, step: int, *, idle: bool, skipped: bool, come_to: object = None) -> None:
        by = (*self.by, come_to or self._trained_by())
        for member in self.basis:
            if member in self.members:
                self._report(step, member, by, idle=idle, skipped=skipped)
        self.by = by
        self.run.standing[step] = self.number

    def _half_a_step(self, step: int) -> None:
        """Some ranks had reported their share when others were killed."""
        by = (*self.by, self._trained_by())
        members = self.rng.sample(self.members, self.rng.randint(0, len(self.members) - 1))
        for member in members:
            self._report(step, member, by, idle=False, skipped=False)
        if members:
            self.run.standing[step] = self.number

    # What a live recovery does.

    def _change(self, step: int, start: int) -> object:
        """Members may be lost in this window or before it, or join; what the window comes to, if not to the usual."""
        if len(self.members) < self.world and step > start and self.rng.random() < 0.3:
            within = self.rng.random() < 0.3 and step + 1 < self.plan.steps
            self._join(step, within=within)
            if within:
                return None
        if len(self.members) < 2 or self.rng.random() > 0.15:
            return None
        return self._lose(step, start)

    def _lose(self, step: int, start: int) -> object:
        lost = tuple(sorted(self.rng.sample(self.members, self.rng.randint(1, len(self.members) - 1))))
        how = self.rng.choice(["before", "complete", "redone", "redone"])
        left = tuple(member for member in self.members if member not in lost)
        for member in lost:
            self._dies(member, step, how, start)
        if self.recovery == "replay" and how == "redone":
            self._replay(step, left, lost)
            return None
        if how == "redone" and len(left) > 1 and self.rng.random() < 0.3:
            left = self._lose_twice(step, left, lost, start)
        else:
            said = self._regrouped(step, left, lost, how)
            self._declare(left, said)
        self.members = left
        if how == "before":
            self._divide(left)
        if how != "redone":
            return None
        if self.recovery == "skip":
            self.run.skipped.add((self.number, step))
        return ("skip" if self.recovery == "skip" else "lossy", self.number, step)

    def _dies(self, member: int, step: int, how: str, start: int) -> None:
        """Killed: its last lines may not have been written yet, or it may have come further than the others.

        A step is written in the next backward, once the last sum of that has begun: so two steps may be lacking.
        """
        who = f"rank-{member}"
        self.run.vouched.add((who, self.number, step - 1))
        lines, shared = self.run.files[who], self.shared
        told = sum(place[1:] == (self.number, step - 1) for place in self.run.pasts)
        last = lines[-1].what
        if isinstance(last, Step) and last.step == step - 1 and told > 1 and self.rng.random() < 0.5:
            lines.pop()
            self.run.pasts.pop((who, self.number, step - 1))
            self.run.vouched.add((who, self.number, step - 2))
            told = sum(place[1:] == (self.number, step - 2) for place in self.run.pasts)
            last = lines[-1].what
            if isinstance(last, Step) and last.step == step - 2 and told > 1 and self.rng.random() < 0.5:
                lines.pop()
                self.run.pasts.pop((who, self.number, step - 2))
        elif how == "redone" and self.rng.random() < 0.2 and self.wrong is None:
            alone = ("alone", member, self.number, step)
            by = (*self.by, self._trained_by() if self.recovery == "replay" else alone)
            self._report(step, member, by, idle=False, skipped=False)
            self.shared = shared
            self.run.void.append(lines[-1])
            self.run.pasts.pop((who, self.number, step))
        elif how == "complete" and self.rng.random() < 0.3 and self.wrong is None:
            self._report(step, member, (*self.by, self._trained_by()), idle=False, skipped=False)
            self.run.vouched.add((who, self.number, step))
        self._was_seen_to_die(member, step, how)

    def _was_seen_to_die(self, member: int, step: int, how: str) -> None:
        """Killed in the window that the others were in, or in the one before or after it; perhaps on purpose.

        Who gave all its gradients may have been one window further, and who gave none may not have begun this one.
        """
        told = [each.what for each in self.run.files[f"rank-{member}"] if isinstance(each.what, Step | Recover)]
        reported = isinstance(told[-1], Step) and told[-1].step == step
        began = max(what.restored or 0 for what in told if isinstance(what, Recover) and what.attempt == self.number)
        struck, late = (step + member) % 3 == 0, (step + 3 * member) % 4 == 0
        if how == "before":
            window = step - (struck or not late)
        elif reported or how == "complete":
            window = step + (late and not struck)
        else:
            window = step - (late and not struck)
        point = "boundary" if how == "before" else "optimizer" if reported or how == "complete" else "backward=0.5"
        if struck:
            self._strike(member, step, "kill", point)
        self._detect(member, window if window >= began else None)

    def _regrouped(self, step: int, left: tuple[int, ...], lost: tuple[int, ...], how: str) -> Regroup:
        self.membership += 1
        missing = self._lacks(step, lost) if how == "redone" and self.recovery != "replay" else []
        if missing and self.wrong == "loss kept quiet":
            missing, self.run.was_wrong = [], True
        kept, redone = {"before": (0, 0), "complete": (2, 0), "redone": (self.rng.choice([0, 1]), 2)}[how]
        where = (self.number, self.membership, step, self.recovery)
        return Regroup(*where, left, lost, tuple(missing), kept, redone, seconds=0.0625)

    def _lacks(self, step: int, lost: Sequence[int]) -> list[int]:
        at = self.plan.position(step)
        if self.recovery == "skip":
            self.missing[self.number, step] = self.plan.batch
            return [int(each) for each in self.plan.window(at)]
        places = [self.basis.index(member) for member in lost if member in self.basis]
        ids = [int(each) for place in places for each in self.plan.share(at, place, len(self.basis))]
        self.missing[self.number, step] = self.missing.get((self.number, step), 0) + len(ids)
        return ids

    def _lose_twice(self, step: int, left: tuple[int, ...], lost: tuple[int, ...], start: int) -> tuple[int, ...]:
        """Others are lost while those who were left find together; some have found together before."""
        more = tuple(sorted(self.rng.sample(left, self.rng.randint(1, len(left) - 1))))
        last = tuple(member for member in left if member not in more)
        first = self._regrouped(step, left, lost, "redone")
        second = self._regrouped(step, last, more, "redone")
        known = {member for member in left if self.rng.random() < 0.5}
        for member in left:
            if member in known:
                self._declare([member], first)
        for member in more:
            self._dies(member, step, "redone", start)
        both = sorted({*first.missing, *second.missing})
        for member in last:
            unseen = second._replace(lost=tuple(sorted(lost + more)), missing=tuple(both))
            self._declare([member], second if member in known else unseen)
        return last

    def _replay(self, step: int, left: tuple[int, ...], lost: tuple[int, ...]) -> None:
        """Replacements train what was lost: nothing is."""
        everybody = self.members
        if self.rng.random() < 0.5:
            said = self._regrouped(step, everybody, lost, "redone")
        else:
            self._declare(left, self._regrouped(step, left, lost, "redone"))
            said = self._regrouped(step, everybody, (), "redone")
        for member in lost:
            self._come(member, step, said)
        self._declare(left, said)

    def _join(self, step: int, *, within: bool) -> None:
        """Members come back before a window, or while it is trained."""
        away = [member for member in range(self.world) if member not in self.members]
        come = self.rng.sample(away, self.rng.randint(1, len(away)))
        if self.supervised and not self.silent and self.rng.random() < 0.1:  # at first it failed before it had joined
            self._detect(come[0])
            self.run.failed_to_join.add(self.started)
        if within:  # then they begin with what this window leaves
            self.shared = self._left((*self.by, self._trained_by()))
        others, self.members = self.members, tuple(sorted([*self.members, *come]))
        self.membership += 1
        where = (self.number, self.membership, step, self.recovery)
        said = Regroup(*where, self.members, redone=2 if within else 0, seconds=0.0625)
        for member in come:
            self._come(member, step + within, said)
        self._declare(others, said)
        if not within:
            self._divide(self.members)

    def _come(self, member: int, step: int, said: Regroup) -> None:
        shared = self.shared  # of the step before, or of the snapshot that they all began with
        if self.wrong == "joined with another state":
            shared, self.run.was_wrong = digest("another"), True
        who, at = f"rank-{member}", self.plan.position(step)
        self.say(who, Open(2, torn=self.rng.choice([0, 40])))
        self.say(who, Attempt(self.number, self.world, member, 2000 + self.membership, self.seed))
        self.say(who, self._plan(digest("data", member if self.wrong == "split without a seed" else "")))
        self._declare([member], said)
        state = {"state": digest("joined", self.by), "fingerprint": shared + digest("own", member)}
        self.say(
            who, Recover(self.number, step or None, *at, "keyed", 0.125, **state)
        )  # before step 0 nothing came back

    def _declare(self, members: Sequence[int], said: Regroup) -> None:
        for member in members:
            self.say(f"rank-{member}", said._replace(seconds=member / 8))

    # What a rank tells.

    def _report(self, step: int, rank: int, by: By, *, idle: bool, skipped: bool) -> None:
        at = self.plan.position(step)
        nothing = self.wrong == "nothing trained" or (self.wrong == "one window not trained" and idle)
        past = by[:-1] if self.wrong == "one window not trained" and idle else by
        past = () if self.wrong == "nothing trained" else past
        place, world = self.basis.index(rank), len(self.basis)
        apart = rank if self.wrong == "replicas apart" and step == self.plan.steps - 1 else ""
        shared, own = self._left(past, apart), digest("own", past, self.salt, rank)
        shown = step + 1 if skipped and self.wrong == "window skipped" else step
        shown = step - 1 if skipped and self.wrong == "window repeated" and step else shown
        told = any((f"rank-{other}", self.number, step) in self.run.pasts for other in self.members if other != rank)
        self.run.was_wrong |= apart != "" and told  # what only one rank tells agrees with itself
        self.shared = shared
        if (nothing and (self.number, step) not in self.run.skipped) or shown != step:
            self.misled.add((self.number, step))
        self.run.pasts[f"rank-{rank}", self.number, step] = by
        self.salts[f"rank-{rank}", self.number, step] = self.salt
        self.say(
            f"rank-{rank}",
            Step(
                *(self.number, world, place, *at, step),
                trained(self.plan, shown, place // self.group, world // self.group),
                Seconds(0.125, 0.5, 0.0),
                state=shared + own,
                reduced=0 if nothing else int(self.world > 1),
                stepped=0 if nothing or (isinstance(by[-1], tuple) and by[-1][0] == "skip") else 1,
                loss=len(past) + place / 8 if self.notes_loss else None,
            ),
        )

    def _left(self, past: By, apart: object = "") -> str:
        """What all ranks share after these steps; a window that was skipped left it as it was."""
        left = tuple(each for each in past if not (isinstance(each, tuple) and each[0] == "skip"))
        return digest("shared", left, self.salt, apart)

    # How an attempt ends.

    def _end(self, end: int, ending: str) -> str:
        ranks = [f"rank-{rank}" for rank in self.members]
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
        elif ending == "stop":
            commits = [e.what for e in self.run.events if isinstance(e.what, Commit) and e.what.step == end]
            for who in ranks:  # without a step of its own it saves nothing: then it can only have left its loop
                self.say(who, Stopped(self.number, end, left=not commits or not commits[-1].stops))
            self.judge("completed")
            self._need(end, None)
        elif ending == "leave":
            self.judge("completed")
        else:
            return self._fail(ending)
        return ending

    def _fail(self, ending: str) -> str:
        rank = self.rng.choice(self.members) if ending != "early" else self.rng.randrange(self.world)
        if self.rng.random() < 0.3 and ending != "early":
            told = (each.what for each in reversed(self.run.files[f"rank-{rank}"]))
            last = next((what for what in told if isinstance(what, Step | Attempt)), None)
            reached = last.step + 1 if isinstance(last, Step) else len(self.by)
            others = any(self.run.pasts.get((f"rank-{each}", self.number, reached)) for each in self.members)
            self._strike(rank, reached, self.rng.choice(["kill", "exit"]), "optimizer" if others else "boundary")
        if self.supervised and (self.silent or self.rng.random() < 0.2):  # the supervisor was killed, too
            self.supervisor_lives = self.silent = False
            return ending
        steps = [step for _, number, step in self.run.pasts if number == self.number]
        self._detect(rank, max(steps) if steps and ending != "early" else None)  # in the last that was summed
        if self.supervised and self.rng.random() < 0.1:
            self.judge("gave-up")
        return ending

    def _strike(self, rank: int, step: int, kind: str, point: str = "boundary") -> None:
        """A failure of a schedule, on record before it strikes."""
        self.say(f"injected-{rank}", Open(2))
        self.say(f"injected-{rank}", Strike(self.number, step, kind, rank, point))

    def _detect(self, rank: int, step: int | None = None) -> None:
        if not self.silent:
            how = {"exit": -9, "signal": "SIGKILL", "step": step}
            self.supervisor(Detect(self.started, rank, rank, "signal", "killed", **how))

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


def is_a(kind: type[Any], who: str | None = None, **fields: object) -> Callable[[Event], bool]:
    """Return a function that returns True for an event of this kind, by this writer, with these fields."""
    return lambda event: (
        isinstance(event.what, kind)
        and who in (None, event.who)
        and all(getattr(event.what, name) == value for name, value in fields.items())
    )


def changed(events: Sequence[Event], which: Callable[[Event], bool], **fields: object) -> list[Event]:
    """The events with these fields in those that are meant; at least one is."""
    assert any(map(which, events))
    return [each._replace(what=each.what._replace(**fields)) if which(each) else each for each in events]  # type: ignore[arg-type]
