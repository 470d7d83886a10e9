"""Kill processes of served runs at any time, kill or suspend whole raylets, and check that the runs end well.

usage: python benchmarks/server/strikes.py [--strikes 40] [--raylets 8] [--seed 12] [--keep FOLDER]

Many short runs on a cluster of a head and three raylets on this machine. All random choices come from the seed, which is
printed; only the timing varies. The history, the output and the logs with all stacks of a run with anything wrong are
kept. Exits with 1 if anything is wrong.
"""

import argparse
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accounts import unaccounted
from command import Command, Late, Plan
from raylets import KINDS, Raylets, raylets, send

from holdfast.audit.verdicts import audit_run

ITERATIONS = {"mlr-digits": 67, "mf-generated": 39, "lda-generated": 25}  # of a run without failures
POLICIES = (("priority", "1/4"), ("priority", "1/8"), ("round", "1/4"), ("random", "1/2"), ("threshold", "1/4"))
RAYLET = {"raylet killed": signal.SIGKILL, "raylet stopped": signal.SIGSTOP}
SECONDS = 240.0  # allowed for a run, on a machine under other load
AT_START = 0.15  # share of strikes that come while processes start


@dataclass(frozen=True, slots=True)
class Strike:
    """A strike of `kind`, `delay` seconds after iteration `after` is done, or after processes start (-1)."""

    kind: str
    after: int
    delay: float
    draw: float  # in 0..1: selects one of the running processes
    everything: bool = False  # strike a raylet with every process on it

    def __str__(self) -> str:
        when = "while starting" if self.after < 0 else f"after iteration {self.after}"
        return f"{self.kind} {when}{' with all on it' if self.everything else ''}"


@dataclass(slots=True)
class Result:
    """The result of a run."""

    plan: Plan
    struck: list[str] = field(default_factory=list)
    missed: int = 0
    iterations: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def main() -> int:
    """Strike as often as asked; print a line for each run and the totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strikes", type=int, default=40, help="kills of one process")
    parser.add_argument("--raylets", type=int, default=8, help="strikes of whole raylets, killed and suspended in turn")
    parser.add_argument("--seed", type=int, default=12)
    parser.add_argument(
        "--keep", type=Path, default=Path("strikes-kept"), help="folder for the files of runs that went wrong"
    )
    arguments = parser.parse_args()
    print(
        f"holdfast {version('holdfast')}, ray {version('ray')}, python {platform.python_version()}, "
        f"{platform.system()} {platform.release()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the "
        f"beginning; seed {arguments.seed}\n",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="strikes-") as folder, raylets(3) as cluster:
        campaign = Campaign(cluster, Path(folder), arguments.keep)
        campaign.strike(on_processes(random.Random(arguments.seed)), arguments.strikes)
        campaign.strike(on_raylets(random.Random(arguments.seed + 1)), arguments.raylets)
    return report(campaign.results)


class Campaign:
    """Runs on one cluster, one after another."""

    def __init__(self, cluster: Raylets, folder: Path, keep: Path) -> None:
        self._cluster, self._folder, self._keep = cluster, folder, keep
        self.results: list[Result] = []

    def strike(self, runs: Iterator[tuple[Plan, list[Strike]]], count: int) -> None:
        """Start runs until `count` strikes have hit a process."""
        hit = 0
        while hit < count:
            plan, strikes = next(runs)
            result = self._run(plan, strikes[: count - hit])
            hit += len(result.struck)
            self.results.append(result)
            words = "well" if not result.wrong else "; ".join(result.wrong)
            print(
                f"run {len(self.results)}: {plan}: {', '.join(result.struck) or 'nothing hit'}: {result.iterations} "
                f"iterations, {result.seconds:.0f} s: {words}",
                file=sys.stderr,
                flush=True,
            )

    def _run(self, plan: Plan, strikes: list[Strike]) -> Result:
        out, result, renew = self._folder / f"run-{len(self.results) + 1}", Result(plan), []
        began = time.time()
        command = Command(plan, self._cluster.address, out, SECONDS)
        try:
            for strike in strikes:
                self._deal(command, strike, result, renew)
            result.wrong += judged(plan, command)
        except Late:
            result.wrong.append(f"not finished after {SECONDS:g} s")
            self._cluster.dump_stacks()
            command.kill()
        result.seconds, result.iterations = time.time() - began, command.iterations()
        print(f"ended after {result.seconds:.0f} s", file=sys.stderr, flush=True)
        for raylet in renew:
            self._cluster.renew(raylet)
        result.wrong += [f"left behind: {who}" for who in self._cluster.left_behind()]
        if result.wrong:
            self._preserve(out, began)
        return result

    def _deal(self, command: Command, strike: Strike, result: Result, renew: list[Any]) -> None:
        """Wait for the moment of a strike, and strike."""
        kinds = (strike.kind,) if strike.kind in KINDS else ("node", "worker")
        came = (
            command.await_iterations(strike.after)
            if strike.after >= 0
            else command.wait(lambda: self._cluster.members(*kinds))
        )
        time.sleep(strike.delay)
        hit = False
        if came and strike.kind in RAYLET:
            if there := self._cluster.inhabited():
                raylet = there[int(strike.draw * len(there))]
                members = self._cluster.strike(raylet, RAYLET[strike.kind], strike.everything)
                renew.append(raylet)
                result.struck.append(f"{strike} ({', '.join(members)})")
                hit = True
        elif came and (pids := sorted(self._cluster.members(strike.kind))):
            hit = send(pids[int(strike.draw * len(pids))], signal.SIGKILL)
            result.struck += [str(strike)] * hit
        result.missed += not hit

    def _preserve(self, out: Path, began: float) -> None:
        """Keep the folder of a run, with the logs written during it."""
        to = self._keep / out.name
        shutil.rmtree(to, ignore_errors=True)
        (to / "logs").mkdir(parents=True)
        if out.exists():
            shutil.copytree(out, to / "run", ignore_dangling_symlinks=True)
        shutil.copy(out.with_suffix(".log"), to / "command.log")
        for log in self._cluster.logs.iterdir():
            if log.is_file() and log.stat().st_mtime >= began and log.stat().st_size:
                shutil.copy(log, to / "logs")


def judged(plan: Plan, command: Command) -> list[str]:
    """Return what is wrong with the end of a run."""
    wrong = []
    status, output = command.end(), command.output.strip()
    if status:
        wrong.append(f"ended with {status}: {output[-300:]}")
    elif "did not converge" in output or "converged" not in output:
        wrong.append(output[-300:])
    else:
        wrong += unaccounted(command.out)
        wrong += [
            f"audit, {finding.check}: {finding.because}"
            for finding in audit_run(command.out)
            if finding.verdict != "pass"
        ]
    return wrong


def on_processes(rng: random.Random) -> Iterator[tuple[Plan, list[Strike]]]:
    """Yield runs in which one to four processes are killed, one after another."""
    while True:
        plan = drawn(rng)
        strikes = [moment(rng, plan, rng.choice(KINDS)) for _ in range(rng.randint(1, 4))]
        yield plan, sorted(strikes, key=lambda strike: strike.after)


def on_raylets(rng: random.Random) -> Iterator[tuple[Plan, list[Strike]]]:
    """Yield runs in which a raylet is killed, and runs in which one is suspended."""
    while True:
        for kind in RAYLET:
            plan = drawn(rng)
            yield plan, [moment(rng, plan, kind, rng.random() < 0.5)]


def drawn(rng: random.Random) -> Plan:
    """Draw a random run."""
    policy, fraction = rng.choice(POLICIES)
    full = rng.random() < 0.2
    return Plan(
        workload=rng.choice(list(ITERATIONS)),
        nodes=rng.randint(2, 4),
        workers=rng.randint(1, 3),
        policy="full" if full else policy,
        fraction="1" if full else fraction,
        interval=8 if fraction == "1/8" else rng.choice((4, 8)),
        restore=rng.choice(("partial", "partial", "full")),
        seed=rng.randrange(1000),
    )


def moment(rng: random.Random, plan: Plan, kind: str, everything: bool = False) -> Strike:
    """Draw a random time for a strike."""
    last = int(0.9 * ITERATIONS[plan.workload])
    after = -1 if rng.random() < AT_START else rng.randrange(last)
    delay = rng.uniform(0, 3.0 if after < 0 else 0.2)
    return Strike(kind, after, delay, rng.random(), everything)


def report(results: list[Result]) -> int:
    """Print a table of the strikes, and the problems; return the exit code."""
    print("| struck | times | runs with it | of which wrong |\n|---|---:|---:|---:|")
    for kind in (*KINDS, *RAYLET):
        of_kind = [result for result in results if any(words.startswith(kind) for words in result.struck)]
        times = sum(words.startswith(kind) for result in of_kind for words in result.struck)
        print(f"| {kind} | {times} | {len(of_kind)} | {sum(bool(result.wrong) for result in of_kind)} |")
    wrong = [line for result in results for line in result.wrong]
    hit = sum(len(result.struck) for result in results)
    seconds = [result.seconds for result in results]
    print(
        f"\n{hit} strikes in {len(results)} runs of {min(seconds):.0f} to {max(seconds):.0f} s; "
        f"{sum(result.missed for result in results)} more found no process; load {os.getloadavg()[0]:.1f} at the end"
    )
    print(
        f"- all runs end, converge, account for everything and leave nothing behind: {'DOES NOT HOLD' if wrong else 'holds'}"
    )
    for result in results:
        for line in result.wrong:
            print(f"  - {result.plan} ({', '.join(result.struck)}): {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
