"""Builds histories of runs of two ranks and their supervisor, attempt by attempt."""

import json
from collections.abc import Sequence

import xxhash

from fake_runs import PLAN, digest, trained
from holdfast.audit.verdicts import Finding, audit, worst
from holdfast.events import Attempt, Commit, Event, Open, Plan, Recover, Seconds, Step, Stopped, What


def by(who: str, *several: What) -> list[Event]:
    return [Event(0.0, who, what) for what in several]


def command(*args: str) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(args).encode())


class TwoRankRun:
    """The events of a run of two ranks."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def trains(
        self,
        attempt: int,
        start: int | None,
        end: int,
        args: Sequence[str] = (),
        *,
        seed: int | None = None,
        weights: str | None = None,
        passed_over: Sequence[int] = (),
        witness_every: int | None = None,
    ) -> "TwoRankRun":
        """Let both ranks restore step `start`, or nothing, and train up to step `end`."""
        for rank in range(2):
            state = None if start is None else digest("saved", start)
            rng, at = ("keyed" if start is None else "restored"), PLAN.position(start or 0)
            plan = (PLAN.samples, PLAN.batch, PLAN.epochs, PLAN.seed, 50, "overlapped", "c")
            bad = tuple({"name": f"step-{step:08d}/", "why": "changed since"} for step in passed_over)
            planned = Plan(attempt, *plan, command=command(*args), witness_every=witness_every)
            self.says(rank, Open(2), Attempt(attempt, 2, rank, 7, seed), planned)
            self.says(rank, Recover(attempt, start, *at, rng, 0.0, bad, state=state, weights=weights))
            for step in range(start or 0, end):
                self.says(rank, share(attempt, rank, step))
        return self

    def saves(self, attempt: int, step: int, *, stops: bool = False) -> "TwoRankRun":
        self.says(0, Commit(attempt, step, 4096, 0.5, state=digest("saved", step), stops=stops))
        return self

    def stops(self, attempt: int, step: int, *, left: bool = False) -> "TwoRankRun":
        """Let the script of both ranks stop the run at `step`, after a save."""
        self.saves(attempt, step, stops=True)
        for rank in range(2):
            self.says(rank, Stopped(attempt, step, left))
        return self

    def supervisor(self, *said: What) -> "TwoRankRun":
        self.events += by("supervisor", *said)
        return self

    def says(self, rank: int, *said: What) -> None:
        self.events += by(f"rank-{rank}", *said)

    def verdict(self) -> str:
        return worst(audit(self.events))

    def found(self, check: str) -> tuple[str, str]:
        return found(audit(self.events), check)


def share(attempt: int, rank: int, step: int) -> Step:
    state = digest("shared", step) + digest("own", rank, step)
    place = (attempt, 2, rank, *PLAN.position(step), step)
    return Step(*place, trained(PLAN, step, rank, 2), Seconds(0.0, 1.0, 0.0), state, reduced=1, stepped=1)


def found(findings: Sequence[Finding], check: str) -> tuple[str, str]:
    return next((each.verdict, each.because) for each in findings if each.check == check)
