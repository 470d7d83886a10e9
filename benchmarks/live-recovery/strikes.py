"""Strike many short runs at random under every recovery. Run: python benchmarks/live-recovery/strikes.py --strikes 300

With --lost-shards, sharded models on 4 ranks train under `replay`, and one rank or two at once are killed each time.
With --sharded, the runs train models that are sharded with FSDP2 and HSDP on 4 or 6 ranks, under `restart` and `replay`,
or with `--strategies partial` under that. Under `restart`, some of them continue with another number of ranks after every restart.

Every run is struck from outside, trains to its end, and is checked: no hang, the same bits on all ranks after every
step, under `replay` and `restart` the bits of a failure-free run (unless the run was scaled meanwhile), a passed audit,
no process left behind, and no threads, open files or shared memory that stay after a recovery. The command exits with 1
if anything is wrong, and keeps the folders of those runs. The same seed gives the same strikes, but the moment at which
a strike hits a run varies.
"""

import argparse
import itertools
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import struck
import struck_sharded
from job import COMMAND, Ended, Hung, Job, interrupted
from judging import Reference, fallbacks, leaks, of_kind, wrong_audit, wrong_bits
from kinds import KINDS, LIVE_ONLY, ONE, RESTART_ONLY, SCALED, SUPERVISOR, TWO, Strike
from shared_memory import left_by
from whole_states import whole_states, wrong_states

EPOCHS, SHARDED_EPOCHS, STRIKES = 15, 3, 6  # per run: 960 steps, and 192 of sharded models, which are slower
CALM, SHARDED_CALM = 20, 10  # the most steps between two strikes
HANG_TIMEOUT = 8  # seconds; of sharded runs, in which a suspended worker is noticed only by this
COLUMNS = ("hangs", "stopped", "wrong bits", "wrong audits", "leaks", "left behind")
STRATEGIES = ("forward", "replay", "skip", "restart")
SHARDED_STRATEGIES = ("replay", "restart", "partial")
SETTLED = 3.0  # seconds after the last recovery; then the connections of lost workers are closed


@dataclass(frozen=True)
class Plan:
    """One run and its strikes."""

    number: int
    strategy: str
    form: str
    workers: int
    save_every: int
    spares: int = 0
    strikes: tuple[Strike, ...] = ()
    workers_after: tuple[int, ...] = ()  # each restart

    @property
    def what(self) -> str:
        spares = f", {self.spares} spare" if self.spares else ""
        workers = ", ".join(map(str, (self.workers, *self.workers_after)))
        return f"{self.strategy}, {self.form}, {workers} workers{spares}, a save every {self.save_every}"

    @property
    def is_exact(self) -> bool:
        """True if the run must have the bits of a failure-free run."""
        scaled = self.workers_after or any(strike.kind == SCALED for strike in self.strikes)
        return self.strategy in ("replay", "restart") and not scaled

    @property
    def is_sharded(self) -> bool:
        return self.form in struck_sharded.FORMS


@dataclass
class Tally:
    """The observations of one run."""

    plan: Plan
    struck: list[str] = field(default_factory=list)
    missed: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)  # column, what
    regroups: int = 0
    restarts: int = 0
    missing: int = 0
    fallbacks: list[str] = field(default_factory=list)  # the declared reasons of restarts under a live recovery
    seconds: float = 0.0


def plans(seed: int, strategies: list[str], forms: list[str], kinds: list[str]) -> Iterator[Plan]:
    """Yield the runs of `seed`, without end."""
    for number in itertools.count():
        rng = random.Random(f"{seed} {number}")
        plan = Plan(number, rng.choice(strategies), rng.choice(forms), rng.choice((3, 4)), rng.choice((7, 50, 200)))
        yield replace(plan, strikes=_strikes(rng, plan, kinds), spares=rng.choice((0, 1)))


def sharded_plans(seed: int, strategies: list[str], forms: list[str], kinds: list[str]) -> Iterator[Plan]:
    """Yield the runs of `seed` with sharded models, without end; some have other numbers of ranks after restarts."""
    for number in itertools.count():
        rng = random.Random(f"{seed} {number} sharded")
        strategy = rng.choice([strategy for strategy in strategies if strategy in SHARDED_STRATEGIES])
        possible = [form for form in forms if strategy != "partial" or not form.startswith("hsdp")]
        plan = Plan(number, strategy, rng.choice(possible), rng.choice((4, 6)), rng.choice((5, 20, 50)))
        worlds = (2, 4, 6) if plan.form.startswith("hsdp") else (2, 3, 4, 5, 6)
        changes = strategy == "restart" and rng.random() < 1 / 3
        after = tuple(rng.choice(worlds) for _ in range(2 * STRIKES)) if changes else ()
        yield replace(plan, strikes=_strikes(rng, plan, kinds), spares=rng.choice((0, 0, 1)), workers_after=after)


def lost_shard_plans(seed: int, one: int, hybrid: int, two: int) -> Iterator[Plan]:
    """Yield the runs of `seed` in which ranks of sharded models are killed, on 4 ranks under `replay`.

    There are `one` and `hybrid` kills of one rank under FSDP2 and HSDP, and `two` kills of two ranks at once."""
    losses = [("fsdp", ONE, one), ("hsdp", ONE, hybrid), ("fsdp", TWO, two // 2), ("hsdp", TWO, two - two // 2)]
    runs = [
        (form, kind, min(STRIKES, count - done)) for form, kind, count in losses for done in range(0, count, STRIKES)
    ]
    random.Random(f"{seed} order").shuffle(runs)  # if the time is up early, some of each kind are done
    for number, (form, kind, count) in enumerate(runs):
        rng = random.Random(f"{seed} {number} lost shards")
        plan = Plan(number, "replay", form, 4, rng.choice((5, 20, 50)), spares=rng.choice((0, 1)))
        yield replace(plan, strikes=tuple(_strike(rng, 4, SHARDED_CALM, [kind]) for _ in range(count)))


def _strikes(rng: random.Random, plan: Plan, kinds: list[str]) -> tuple[Strike, ...]:
    other = LIVE_ONLY if plan.strategy == "restart" else RESTART_ONLY
    possible = [kind for kind in kinds if kind not in other and not (plan.is_sharded and kind == SCALED)]
    most, calm = max((plan.workers, *plan.workers_after)), SHARDED_CALM if plan.is_sharded else CALM
    return tuple(_strike(rng, most, calm, possible) for _ in range(STRIKES))


def _strike(rng: random.Random, workers: int, calm: int, kinds: list[str]) -> Strike:
    return Strike(
        kind=rng.choice(kinds),
        steps=rng.randint(3, calm),
        delay=rng.random() * 0.05,
        ranks=tuple(rng.sample(range(workers), workers)),
        then=rng.random() ** 2 * 0.25,
        newcomer=rng.random() < 0.5,
    )


class Bench:
    """The runs of one command."""

    def __init__(self, place: Path, limit: float) -> None:
        self._place, self._limit = place, limit
        self._references: dict[tuple[str, str, int], Reference] = {}
        self._turns: dict[tuple[str, str, int], threading.Lock] = {}

    def run(self, plan: Plan) -> Tally:
        """Strike one run as planned, and check it; keep its folder if anything was wrong."""
        tally, began = Tally(plan), time.monotonic()
        job = self._job(plan, f"run-{plan.number:03d}")
        (job.folder / "plan.json").write_text(json.dumps(asdict(plan), indent=1))
        try:
            job.start()
            _deal(job, plan, tally)
            tally.wrong += [("leaks", problem) for problem in leaks(job, SETTLED)]
            (job.control / "hurry").touch()
            if status := job.await_end():
                tally.wrong.append(("stopped", f"the command ended with {status}: {job.last_lines()}"))
            else:
                self._judge(job, tally)
        except Hung as hung:
            job.dump_and_kill()
            tally.wrong.append(("hangs", str(hung)))
        finally:
            if job.processes():
                job.dump_and_kill()
        tally.seconds = time.monotonic() - began
        if tally.wrong:
            (job.folder / "wrong.txt").write_text("\n".join(": ".join(problem) for problem in tally.wrong))
        else:
            shutil.rmtree(job.folder)
        return tally

    def _job(self, plan: Plan, name: str) -> Job:
        folder, subject = self._place / name, struck_sharded if plan.is_sharded else struck
        options = ["--workers", plan.workers, "--recovery", plan.strategy, "--save-every", plan.save_every]
        options += ["--max-restarts", 20, "--spares", plan.spares, "--out", folder / "run"]
        if plan.is_sharded:
            options += ["--hang-timeout", HANG_TIMEOUT]
        if plan.workers_after:
            options += ["--workers-after", ",".join(map(str, plan.workers_after))]
        epochs = SHARDED_EPOCHS if plan.is_sharded else EPOCHS
        command = [*COMMAND, "run", *options, subject.__file__, "--", plan.form, epochs, folder / "control"]
        most, changes = max((plan.workers, *plan.workers_after)), bool(plan.workers_after)
        return Job(folder, most, [*map(str, command)], limit=self._limit, changes=changes)

    def _judge(self, job: Job, tally: Tally) -> None:
        plan = tally.plan
        left = [*job.left, *job.gone()]  # first: nothing may run during the checks
        left += [f"{name} in /dev/shm" for name in left_by(job.seen)]
        reference = self._reference(plan)
        found: list[tuple[str, Iterable[str]]] = [
            ("left behind", left),
            ("wrong bits", wrong_bits(job, reference, is_exact=plan.is_exact)),
            ("wrong audits", wrong_audit(job)),
        ]
        if plan.is_sharded:
            wrong = wrong_states(whole_states(job.notes), reference.whole, is_exact=plan.is_exact)
            found.append(("wrong bits", itertools.islice(wrong, 3)))
        tally.wrong += [(column, what) for column, problems in found for what in problems]
        regroups = {(event["attempt"], event["number"]): event for event in of_kind(job, "regroup")}
        tally.regroups = len(regroups)
        tally.missing = sum(len(event.get("missing", ())) for event in regroups.values())
        tally.restarts = max(tail.attempt for tail in job.tails) - 1
        if plan.strategy != "restart":
            tally.fallbacks = fallbacks(job)
            if len(tally.fallbacks) < tally.restarts and SUPERVISOR not in tally.struck:
                tally.wrong.append(
                    ("stopped", f"{tally.restarts} restarts, for which only {tally.fallbacks} are declared")
                )

    def _reference(self, plan: Plan) -> Reference:
        """Return the result of the failure-free run of the same form and number of workers, with any recovery."""
        key = "restart", plan.form, plan.workers
        with self._turns.setdefault(key, threading.Lock()):
            if key not in self._references:
                bare = Plan(-1, *key, save_every=50)
                job = self._job(bare, "-".join(map(str, ("reference", *key))))
                (job.control / "hurry").touch()
                job.start()
                if status := job.await_end():
                    raise SystemExit(f"the failure-free run ended with {status}: {job.last_lines()}")
                self._references[key] = Reference.of(job)
                shutil.rmtree(job.folder)
            return self._references[key]


def _deal(job: Job, plan: Plan, tally: Tally) -> None:
    """Apply the strikes, each after the world is whole again and has trained some steps."""
    since = -1
    for number, strike in enumerate(plan.strikes):
        try:
            job.wait(lambda since=since, steps=strike.steps: job.is_whole(steps, since))
            time.sleep(strike.delay)
            since = job.reached()
            job.processes()  # remember them all: a segment of shared memory is known by the process that made it
            hit = KINDS[strike.kind](job, strike)
        except Ended:
            tally.missed += len(plan.strikes) - number
            return
        tally.struck += [strike.kind] * hit
        tally.missed += not hit
    with suppress(Ended):
        job.wait(lambda: job.is_whole(3, since))


def main() -> None:
    """Strike until the wanted number is reached, and print the table."""
    given = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that running jobs are ended
    kinds = [kind for kind in KINDS if any(word in kind for word in given.kinds)]
    print(f"seed {given.seed}", file=sys.stderr, flush=True)
    place = Path(given.keep or tempfile.mkdtemp(prefix="strikes-"))
    bench, began, tallies = Bench(place, given.limit), time.monotonic(), []
    with suppress(KeyboardInterrupt):  # report the runs that have ended by then
        for tally in _all(bench, _planned(given, kinds), given, began):
            tallies.append(tally)
            _tell(tally, sum(len(done.struck) for done in tallies), given.strikes, time.monotonic() - began)
    (_report_shards if given.lost_shards else _report)(tallies, given.seed, time.monotonic() - began)
    if given.json:
        Path(given.json).write_text(json.dumps({"seed": given.seed, "runs": [asdict(tally) for tally in tallies]}))
    wrong = any(tally.wrong for tally in tallies)
    if wrong:
        print(f"the folders of the runs that went wrong are in {place}", file=sys.stderr)
    elif not given.keep:
        shutil.rmtree(place)
    sys.exit(1 if wrong or not tallies else 0)


def _planned(given: argparse.Namespace, kinds: list[str]) -> Iterator[Plan]:
    if given.lost_shards:
        return lost_shard_plans(given.seed, *given.lost_shards)
    if given.sharded:
        return sharded_plans(given.seed, given.strategies, given.forms or list(struck_sharded.FORMS), kinds)
    return plans(given.seed, given.strategies, given.forms or list(struck.FORMS), kinds)


def _all(bench: Bench, planned: Iterator[Plan], given: argparse.Namespace, began: float) -> Iterator[Tally]:
    """Yield runs as they end, with `--jobs` at once; start none after `--strikes` strikes or `--minutes` minutes."""
    struck, under_way, is_last = 0, set[Future[Tally]](), False
    with ThreadPoolExecutor(given.jobs) as pool:
        while True:
            expected = struck + STRIKES * len(under_way)
            late = time.monotonic() - began > 60 * given.minutes
            if len(under_way) < given.jobs and expected < given.strikes and not (late or is_last):
                plan = next(planned, None)
                if plan is None:
                    is_last = True
                elif not given.only or plan.number in given.only:
                    under_way.add(pool.submit(bench.run, plan))
                elif plan.number > max(given.only):
                    given.strikes = 0
                continue
            if not under_way:
                return
            try:
                done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            except KeyboardInterrupt:
                interrupted.set()  # the pool ends when its runs have ended
                raise
            for future in done:
                struck += len(future.result().struck)
                yield future.result()


def _tell(tally: Tally, strikes: int, wanted: int, seconds: float) -> None:
    wrong = "; ".join(f"{column}: {what}" for column, what in tally.wrong)
    print(
        f"run {tally.plan.number} ({tally.plan.what}): {len(tally.struck)} strikes, {tally.regroups} regroups, "
        f"{tally.restarts} restarts, {tally.seconds:.0f} s, {'WRONG ' + wrong if wrong else 'fine'}; "
        f"{strikes} of {wanted} in {seconds / 60:.1f} min",
        file=sys.stderr,
        flush=True,
    )


def _report_shards(tallies: list[Tally], seed: int, seconds: float) -> None:
    """Print the table of --lost-shards: a row for each kind of model and loss."""
    print(f"{_versions()}; seed {seed}; {len(tallies)} runs in {seconds / 60:.1f} minutes\n")
    print(f"| | runs | losses | restarts, declared | {' | '.join(COLUMNS)} |\n|---|{'---:|' * (3 + len(COLUMNS))}")
    names = {"fsdp": "FSDP2, 4 ranks", "hsdp": "HSDP, 2 x 2 ranks"}
    for form, kind in itertools.product(names, (ONE, TWO)):
        of_row = [tally for tally in tallies if (tally.plan.form, tally.plan.strikes[0].kind) == (form, kind)]
        wrong = Counter(column for tally in of_row for column, _ in tally.wrong)
        losses = sum(len(tally.struck) for tally in of_row) // (2 if kind == TWO else 1)
        cells = [len(of_row), losses, sum(len(tally.fallbacks) for tally in of_row), *(wrong[name] for name in COLUMNS)]
        print(f"| {names[form]}: {kind} | {' | '.join(map(str, cells))} |")
    for reason, count in Counter(reason for tally in tallies for reason in tally.fallbacks).most_common():
        print(f"\n{count} x restarted: {reason}")


def _versions() -> str:
    import torch

    return f"python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores"


def _report(tallies: list[Tally], seed: int, seconds: float) -> None:
    """Print the tables of the README."""
    hits = Counter((kind, tally.plan.strategy) for tally in tallies for kind in tally.struck)
    forms = Counter(f"{tally.plan.form} on {tally.plan.workers}" for tally in tallies)
    print(f"{_versions()}; seed {seed}")
    print(f"{hits.total()} strikes in {len(tallies)} runs in {seconds / 60:.1f} minutes\n")
    print(f"forms: {', '.join(f'{form} {count}' for form, count in sorted(forms.items()))}\n")
    used = {tally.plan.strategy for tally in tallies}
    strategies = [strategy for strategy in (*STRATEGIES, "partial") if strategy in used]
    print(f"| strike | {' | '.join(strategies)} |\n|---|{'---:|' * len(strategies)}")
    for kind in KINDS:
        print(f"| {kind} | {' | '.join(str(hits[kind, strategy]) for strategy in strategies)} |")
    print("\n| | runs | strikes | regroups | restarts | samples declared missing | ", end="")
    print(f"{' | '.join(COLUMNS)} |\n|---|{'---:|' * (5 + len(COLUMNS))}")
    for strategy in strategies:
        print(_row(strategy, [tally for tally in tallies if tally.plan.strategy == strategy]))
    print(_row("**all**", tallies))
    print(f"\n{sum(tally.missed for tally in tallies)} more were planned, but found no process left to strike.")


def _row(name: str, tallies: list[Tally]) -> str:
    wrong = Counter(column for tally in tallies for column, _ in tally.wrong)
    cells: list[Any] = [len(tallies), sum(len(tally.struck) for tally in tallies)]
    cells += [sum(getattr(tally, name) for tally in tallies) for name in ("regroups", "restarts", "missing")]
    return f"| {name} | {' | '.join(map(str, [*cells, *(wrong[column] for column in COLUMNS)]))} |"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strikes", type=int, default=300, help="start no run after this many strikes")
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 2**32, help="determines the runs and their strikes"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="start no run after this time")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that one run may take")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 4), help="runs at once")
    strategies = sorted({*STRATEGIES, *SHARDED_STRATEGIES})
    parser.add_argument("--strategies", nargs="*", choices=strategies, default=list(STRATEGIES))
    parser.add_argument(
        "--sharded", action="store_true", help="strike sharded models, under restart and replay, or partial if given"
    )
    parser.add_argument(
        "--lost-shards",
        type=int,
        nargs=3,
        metavar=("ONE", "HSDP", "TWO"),
        help="kill one rank of FSDP2 ONE times, one of HSDP 2 x 2 HSDP times, and two at once TWO times, under replay",
    )
    forms = (*struck.FORMS, *struck_sharded.FORMS)
    parser.add_argument("--forms", nargs="*", choices=forms, help="forms of the training script (default: all)")
    parser.add_argument("--kinds", nargs="*", default=[""], help="only kinds whose name contains one of these words")
    parser.add_argument("--only", type=int, nargs="*", help="only the runs with these numbers")
    parser.add_argument("--keep", help="folder for the runs; only runs with something wrong are kept")
    parser.add_argument("--json", help="write the observations of every run to this file")
    given = parser.parse_args()
    if given.lost_shards:
        given.strikes = 10 * sum(given.lost_shards)  # the plans end before
    return given


if __name__ == "__main__":
    main()
