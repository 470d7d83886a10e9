"""Strike runs of 3 and 4 workers from outside, hundreds of times. Run: python benchmarks/soak/bench.py --strikes 500

Every run is struck by signals and by damage to its files, trains to its end, and is checked: its bits are those of a
failure-free run, the audit passes it, and nothing is left behind. The command exits with 1 if anything is wrong, and
keeps the folders of those runs. The same seed gives the same strikes, but the moment at which a strike hits varies.
"""

import argparse
import json
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from job import HANG_TIMEOUT, KEEP_LAST, Ended, Hung, Job
from judging import Reference, left_behind, struck_by_the_command, wrong_audit, wrong_bits
from schedule import DECK, FULL, KINDS, Plan, plans
from striking import Tally, deal

COLUMNS = ("hangs", "stopped", "wrong bits", "wrong audits", "left behind")
AGAIN = 5  # restarts of a command that has ended unexpectedly
DISK = "48m"


@dataclass(slots=True)
class Result:
    """The results of all runs."""

    tallies: list[Tally] = field(default_factory=list)
    skipped: frozenset[str] = frozenset()
    started: float = field(default_factory=time.monotonic)

    @property
    def strikes(self) -> int:
        return sum(len(tally.struck) for tally in self.tallies)


def main() -> None:
    """Strike until the wanted number is reached, and print the table."""
    given = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that running jobs are ended
    options, impossible = _abilities()
    skipped = impossible | {kind for kind in DECK if not any(word in kind for word in given.kinds)}
    result = Result(skipped=skipped)
    print(f"seed {given.seed}", file=sys.stderr)
    place = Path(given.keep or tempfile.mkdtemp(prefix="soak-"))
    references: dict[tuple[str, int], Reference] = {}
    with suppress(KeyboardInterrupt):  # report the runs that have ended by then
        for plan in plans(given.seed, skipped):
            if result.strikes >= given.strikes or time.monotonic() - result.started > 60 * given.minutes:
                break
            if plan.number in (given.only or (plan.number,)):
                reference = _reference(plan, place, options, references)
                tally = one_run(plan, place / f"run-{plan.number:03d}", options, reference)
                result.tallies.append(tally)
                _tell(plan, tally, result, given.strikes)
            elif plan.number > max(given.only):
                break
    _report(result, given.seed)
    wrong = any(tally.wrong for tally in result.tallies)
    if wrong:
        print(f"the folders of the runs that went wrong are in {place}", file=sys.stderr)
    elif not given.keep:
        shutil.rmtree(place)
    sys.exit(1 if wrong else 0)


def one_run(plan: Plan, folder: Path, options: list[str], reference: Reference) -> Tally:
    """Strike one run as planned, and check it; keep its folder if anything was wrong."""
    job, tally = Job(plan, folder, options), Tally()
    (folder / "plan.json").write_text(json.dumps(asdict(plan), indent=1))
    with _small_disk(job):
        try:
            job.start()
            _struck_to_its_end(job, tally)
            tally.struck += struck_by_the_command(job)
            _judge(job, tally, reference)
        except Hung as hung:
            job.dump_and_kill()
            tally.fault("hangs", str(hung))
        finally:
            if job.members():
                job.dump_and_kill()
            _keep_evidence(job, tally)
    if not tally.wrong:
        shutil.rmtree(folder)
    return tally


def _struck_to_its_end(job: Job, tally: Tally) -> None:
    """Apply every strike; an unexpected end of the command is a fault, after which the command is started again."""
    waiting, again = list(job.plan.strikes), 0
    while waiting or job.status is None:
        try:
            if not waiting:
                raise Ended(job.await_end())
            deal(job, waiting[0], tally)
            del waiting[0]
        except Ended as end:
            if end.status == 0:
                tally.missed += len(waiting)
                return
            tally.fault("stopped", f"the command ended with {end.status}: {_last_line(job)}")
            if (again := again + 1) > AGAIN:
                return
            job.start()


def _judge(job: Job, tally: Tally, reference: Reference) -> None:
    """Add the faults found at the end of the run to the tally."""
    for column, found in (
        ("left behind", left_behind(job)),  # first: no process may run during the other checks
        ("wrong bits", wrong_bits(job, reference)),
        ("wrong audits", wrong_audit(job)),
    ):
        for what in found:
            tally.fault(column, what, "of a whole run")


def _reference(plan: Plan, place: Path, options: list[str], known: dict[tuple[str, int], Reference]) -> Reference:
    """Return the result of the failure-free run of the same model and number of workers."""
    key = plan.model, plan.workers
    if key not in known:
        bare = replace(plan, strikes=(), fault=None, fault_at=(), small_disk=False, loaders=0)
        job = Job(bare, place / f"reference-{'-'.join(map(str, key))}", options)
        job.start()
        if status := job.await_end():
            raise SystemExit(f"the failure-free run ended with {status}: {_last_line(job)}")
        known[key] = Reference.of(job)
        shutil.rmtree(job.folder)
    return known[key]


@contextmanager
def _small_disk(job: Job) -> Iterator[None]:
    if not job.plan.small_disk:
        yield
        return
    job.small_disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(job.small_disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(job.small_disk)], check=True)


def _keep_evidence(job: Job, tally: Tally) -> None:
    if not tally.wrong:
        return
    (job.folder / "wrong.txt").write_text("\n".join(f"{column}; {kind}; {what}" for column, kind, what in tally.wrong))
    (job.folder / "struck.txt").write_text("\n".join(tally.struck))
    if job.plan.small_disk:  # otherwise unmounting the disk would lose it
        shutil.copytree(job.small_disk, job.folder / "disk-kept", symlinks=True, ignore=_pipes)


def _pipes(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(folder) / name).is_fifo()]


def _abilities() -> tuple[list[str], frozenset[str]]:
    """Return the options of the command, and the kinds that cannot be tried on this machine."""
    options = ["--hang-timeout", f"{HANG_TIMEOUT:g}", "--keep-last", str(KEEP_LAST)]
    return options, frozenset() if _can_mount() else frozenset({FULL})


def _can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder]
        can = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        if can:
            subprocess.run(["umount", folder], check=True)
    return can


def _last_line(job: Job) -> str:
    lines = job.log.read_text(errors="replace").splitlines()
    return " | ".join(line.strip() for line in lines[-3:])


def _tell(plan: Plan, tally: Tally, result: Result, wanted: int) -> None:
    how = (
        "fine"
        if not tally.wrong
        else f"WRONG: {'; '.join(f'{column} ({kind}): {what}' for column, kind, what in tally.wrong)}"
    )
    minutes = (time.monotonic() - result.started) / 60
    print(
        f"run {plan.number} ({plan.what}): {len(tally.struck)} strikes, {how}; {result.strikes} of {wanted} in {minutes:.1f} min",
        file=sys.stderr,
        flush=True,
    )


def _report(result: Result, seed: int) -> None:
    """Print the tables of the README."""
    struck = Counter(kind for tally in result.tallies for kind in tally.struck)
    in_time = Counter(kind for tally in result.tallies for kind in tally.in_time)
    wrong = Counter((column, kind) for tally in result.tallies for column, kind, _ in tally.wrong)
    minutes = (time.monotonic() - result.started) / 60
    print(f"python {platform.python_version()}, torch {torch.__version__}, {platform.system()} {platform.release()}")
    print(
        f"{_processor()}; seed {seed}; {result.strikes} strikes in {len(result.tallies)} runs in {minutes:.0f} minutes\n"
    )
    print(f"| strike | struck | {' | '.join(COLUMNS)} |\n|---|---:|{'---:|' * len(COLUMNS)}")
    for kind in KINDS:
        count = "not tried" if kind in result.skipped and not struck[kind] else str(struck[kind])
        print(f"| {kind} | {count} | {' | '.join(str(wrong[column, kind]) for column in COLUMNS)} |")
    whole = [str(wrong[column, "of a whole run"]) for column in COLUMNS]
    print(f"| (seen at the end of a run) | | {' | '.join(whole)} |")
    totals = [str(sum(count for (name, _), count in wrong.items() if name == column)) for column in COLUMNS]
    print(f"| **total** | **{result.strikes}** | {' | '.join(f'**{total}**' for total in totals)} |\n")
    late = {
        kind: count - in_time[kind]
        for kind, count in struck.items()
        if kind.startswith("SIGKILL") and count > in_time[kind]
    }
    print(f"{sum(tally.missed for tally in result.tallies)} more were planned, but found no process left to strike.")
    for kind, count in late.items():
        print(f"{kind}: {count} of {struck[kind]} hit the run a moment too late.")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return f"{names[0] if names else platform.machine()} ({platform.machine()}), {len(names)} cores"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strikes", type=int, default=500, help="start no run after this many strikes")
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 2**32, help="determines the runs and their strikes"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="start no run after this time")
    parser.add_argument("--only", type=int, nargs="*", help="only the runs with these numbers")
    parser.add_argument("--kinds", nargs="*", default=[""], help="only kinds whose name contains one of these words")
    parser.add_argument("--keep", help="folder for the runs; only runs with something wrong are kept")
    return parser.parse_args()


if __name__ == "__main__":
    main()
