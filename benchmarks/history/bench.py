"""Measure the size of a history and the speed of its audit, as lines and folded into segments.

    python benchmarks/history/bench.py run [--steps 40000]                          2 workers, three kills
    python benchmarks/history/bench.py synthetic [--ranks 1024] [--steps 100000]    written by synthetic.py

An audit runs in a process of its own. Its speed is in rank-steps per second of processor time, without the imports.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import synthetic

from holdfast.history.folded import folded

HERE = Path(__file__).parent
AUDIT = """
import json, resource, sys, time
from holdfast.audit.verdicts import audit_run, worst
begun = time.process_time()
findings = audit_run(sys.argv[1])
seconds = time.process_time() - begun
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([seconds, memory, worst(findings), [list(map(str, (f.check, f.verdict, f.because))) for f in findings]]))
"""


def size(history: Path) -> int:
    """Return the bytes that the files of a history take, without holes."""
    status = [path.stat() for path in history.rglob("*") if path.is_file()]
    return sum(min(one.st_size, one.st_blocks * 512) for one in status)


def audit(name: str, history: Path, steps: int) -> list[list[str]]:
    """Audit a history three times, print a row of the table, and return the findings."""
    results = [
        json.loads(subprocess.run([sys.executable, "-c", AUDIT, history], check=True, capture_output=True).stdout)
        for _ in range(3)
    ]
    rates = sorted(steps / seconds / 1e6 for seconds, *_ in results)
    memory, verdict = max(result[1] for result in results), results[0][2]
    row = f"{size(history) / steps:.1f} | {rates[1]:.3f} ({rates[0]:.3f} to {rates[-1]:.3f}) | {memory:.0f} | {verdict}"
    sys.stdout.write(f"| {name} | {steps:,} | {row} |\n")
    findings: list[list[str]] = results[0][3]
    return findings


def unfolded(history: Path, into: Path) -> Path:
    """Write the files of `history` into the folder `into` as they were before their lines were folded."""
    into.mkdir()
    for file in history.glob("*.jsonl"):
        with (into / file.name).open("wb") as whole:
            whole.writelines(folded(file).read(0, file.stat().st_size))
    return into


def run(steps: int) -> int:
    """Train with three kills, and compare the history as it is with the same history as lines."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        kills = "+".join(str(steps * percent // 100 + 3) for percent in (20, 54, 83))
        command = [sys.executable, "-m", "holdfast", "run", HERE / "train.py", "--workers", "2", "--out", out]
        options = ["--save-every", str(steps // 80), "--inject", f"kill@{kills},rank=1", "--", str(steps)]
        subprocess.run([*command, *options], check=True, capture_output=True)
        plain = unfolded(out / "history", Path(folder) / "lines")
        trained = sum(file.read_bytes().count(b'\n{"event": "step"') for file in plain.iterdir())
        findings = audit("lines", plain, trained)
        return int(audit("folded", out / "history", trained) != findings)


def large(ranks: int, steps: int) -> int:
    """Write and audit the history of a large job."""
    with TemporaryDirectory() as folder:
        history = Path(folder) / "history"
        synthetic.write(history, ranks, steps)
        findings = audit(f"{ranks:,} ranks", history, ranks * steps)
    return int(any(finding[1] != "pass" for finding in findings))


def main() -> int:
    """Print the rows of the table; return 1 if an audit has other findings than it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "synthetic"])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--ranks", type=int, default=1024)
    given = parser.parse_args()
    sys.stdout.write("| history | rank-steps | bytes each | audit, millions a second | MB of memory | verdict |\n")
    return run(given.steps or 40_000) if given.what == "run" else large(given.ranks, given.steps or 100_000)


if __name__ == "__main__":
    sys.exit(main())
