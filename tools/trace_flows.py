"""Count the files of holdfast that a reader opens to follow one of five flows, by tracing real runs.

    python tools/trace_flows.py [--src DIR] [--repeat N] [--json FILE] [--list]

A file is entered when a function in it is called or a generator in it resumes. The flows are:

batch    from the call of `run.batches` to the first batch in the script, in rank 1 (rank 0 starts its first save then)
save     from the end of the step after which a save is due to its `commit` event, in rank 0; files that a step without
         a save enters as well belong to the training loop and do not count
restart  from the kill of rank 1 to the last `recover` event, in all processes; files of the flow `batch` do not count,
         because the new attempt enters its loop like any other
forward  from the kill of rank 1, with `--recovery forward`, to the first `regroup` event, in all processes
audit    all of `holdfast audit`, for the run that was restarted

FOUNDATIONS are the formats and helpers that nearly every flow uses. They are counted in a column of their own.
Each flow runs several times. The count is that of the files entered every time; the last column adds files that were
entered at least once, such as those of a timer of the supervisor that happened to fire.

The tool knows nothing else about the layout, so it can compare two source trees. It relies on the commands `run` and
`audit` with `--workers`, `--recovery`, `--save-every` and `--out`, on `attach`, `replicate`, `protect` and `batches`,
and on the events in the history. This file is also the script that is trained.
"""

import argparse
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOUNDATIONS = (
    "errors.py",
    "events/",
    "finding.py",
    "history/",
    "memory.py",
    "process.py",
    "progress.py",
    "sampler/",
    "stall.py",
    # Their names before the packages were reorganised, for comparisons with that tree.
    "audit/finding.py",
    "checkpoint/memory.py",
    "ddp/falling_back.py",
    "ddp/past.py",
    "ddp/preemption.py",
    "gathering.py",
    "geometry.py",
    "history.py",
    "lineage.py",
    "permutation.py",
    "room.py",
    "samples.py",
)
LIMITS = {"batch": 16, "save": 14, "restart": 26, "forward": 20, "audit": 18}
STEPS, SAVE_EVERY, KILL_AT, BATCH = 100, 20, 70, 16  # the kill is between two saves
DEADLINE = 180.0  # seconds for one command: each takes some 10 to 20
CALLS, PACKAGE, NOTES, KILLS = "TRACE_FLOWS_CALLS", "TRACE_FLOWS_PACKAGE", "TRACE_FLOWS_NOTES", "TRACE_FLOWS_KILLS"


def train() -> None:
    """Train a small network and note the moments that bound the flows; rank 1 kills itself once if KILLS is set."""
    import torch

    import holdfast

    run = holdfast.attach()
    data = torch.utils.data.TensorDataset(torch.randn(STEPS * BATCH, 16), torch.randint(4, (STEPS * BATCH,)))
    model = run.replicate(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters())
    run.protect(model=model, optimizer=optimizer)
    names = inspect.signature(run.batches).parameters
    options: dict[str, Any] = {next(name for name in names if name.startswith("global_batch")): BATCH}
    options[next(name for name in names if name.endswith("epochs"))] = 1
    has_killed = any(moment["what"] == "kill" for moment in noted())
    kills = os.environ["RANK"] == "1" and os.environ[KILLS] == "1" and not has_killed
    began = time.time()
    for count, (x, y) in enumerate(run.batches(data, **options), 1):
        if count == 1:
            arrived = time.time()
            note("batches", began)
            note("first", arrived)
        time.sleep(0.005)  # so that a save is done before the next one begins
        out = model(x)
        if kills and count == KILL_AT:
            out.register_hook(die)  # it is called inside backward
        torch.nn.functional.cross_entropy(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        note("end", time.time(), count)


def die(_: Any) -> None:
    """Note the time and kill this process, once the other rank waits in the all-reduce of the same backward."""
    time.sleep(0.2)
    note("kill", time.time())
    os.kill(os.getpid(), signal.SIGKILL)


def note(what: str, at: float, count: int = 0) -> None:
    """Append a moment of this process to the notes of the run."""
    line = {"what": what, "time": at, "count": count, "rank": int(os.environ["RANK"]), "pid": os.getpid()}
    with Path(os.environ[NOTES]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def noted() -> list[dict[str, Any]]:
    """Read the notes of the run that this process is part of."""
    path = Path(os.environ[NOTES])
    return list(lines_of(path)) if path.exists() else []


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Read a file of JSON lines, without a last line that a killed process left incomplete."""
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


class Watched:
    """A command of holdfast that ran to its end, with a record of every call into the package."""

    def __init__(self, src: Path, folder: Path, *command: str, kills: bool = False) -> None:
        self.folder = folder
        calls = folder / "calls"
        calls.mkdir(parents=True)
        here = Path(__file__).resolve()
        path = os.pathsep.join([str(here.parent / "flow_hook"), str(src), os.environ.get("PYTHONPATH", "")])
        variables = {
            "PYTHONPATH": path.rstrip(os.pathsep),
            CALLS: str(calls),
            PACKAGE: str((src / "holdfast").resolve()),
            NOTES: str(folder / "notes.jsonl"),
            KILLS: "1" if kills else "0",
        }
        with (folder / "output.txt").open("w+") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "holdfast", *command],
                env={**os.environ, **variables},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status: int | str = process.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = f"none within {DEADLINE:.0f} s"
            output.seek(0)
            if status != 0:
                sys.exit(f"holdfast {' '.join(command)}: exit status {status}\n{output.read()[-4000:]}")

    def notes(self, what: str, rank: int) -> list[dict[str, Any]]:
        """Return the moments of kind `what` that the script noted on `rank`."""
        moments = [m for m in lines_of(self.folder / "notes.jsonl") if (m["what"], m["rank"]) == (what, rank)]
        return moments or sys.exit(f"{self.folder.name}: the script of rank {rank} noted no {what!r}.")

    def events(self, kind: str, after: float = 0.0) -> list[dict[str, Any]]:
        """Return the events of `kind` after the time `after`, in order of time."""
        history = (event for path in (self.folder / "run" / "history").glob("*.jsonl") for event in lines_of(path))
        events = [event for event in history if event["event"] == kind and event["time"] > after]
        return sorted(events, key=_time) or sys.exit(f"{self.folder.name}: the history has no event {kind!r}.")

    def entered(self, begin: float = 0.0, end: float = float("inf"), pid: int | None = None) -> set[str]:
        """Return the files entered between `begin` and `end`, by the process `pid` or by all processes."""
        files = set()
        for path in (self.folder / "calls").glob("*.txt" if pid is None else f"{pid}.txt"):
            for line in path.read_text().splitlines(keepends=True):
                at, _, name = line.partition(" ")
                if name.endswith("\n") and begin <= float(at) <= end:
                    files.add(name.rstrip("\n"))
        return files


def _time(event: dict[str, Any]) -> float:
    return float(event["time"])


def watch(src: Path, folder: Path) -> dict[str, set[str]]:
    """Run everything once and return the files that each flow enters."""

    def run(name: str, recovery: str, *, kills: bool) -> Watched:
        options = ["--workers", "2", "--recovery", recovery, "--save-every", str(SAVE_EVERY), "--out", "run"]
        return Watched(src, folder / name, "run", *options, str(Path(__file__).resolve()), kills=kills)

    plain = run("plain", "restart", kills=False)
    called, first = plain.notes("batches", 1)[0], plain.notes("first", 1)[0]
    batch = plain.entered(called["time"], first["time"], called["pid"])

    commits = plain.events("commit")
    commit = commits[len(commits) // 2]
    ends = {moment["count"]: moment for moment in plain.notes("end", 0)}
    due, later = ends[commit["step"]], ends[commit["step"] + SAVE_EVERY // 2]
    step = plain.entered(later["time"], ends[later["count"] + 2]["time"], due["pid"])
    save = plain.entered(due["time"], commit["time"], due["pid"]) - step

    killed = run("restart", "restart", kills=True)
    kill = killed.notes("kill", 1)[0]["time"]
    restart = killed.entered(kill, killed.events("recover", kill)[-1]["time"]) - batch

    survived = run("forward", "forward", kills=True)
    kill = survived.notes("kill", 1)[0]["time"]
    forward = survived.entered(kill, survived.events("regroup", kill)[0]["time"])

    audit = Watched(src, folder / "audit", "audit", str(killed.folder / "run")).entered()
    return {"batch": batch, "save": save, "restart": restart, "forward": forward, "audit": audit}


def main() -> None:
    """Print how many files each flow enters, and exit with status 1 if a flow exceeds its limit."""
    parser = argparse.ArgumentParser(description="Count how many files of holdfast are entered in each of five flows.")
    source = Path(__file__).resolve().parent.parent / "src"
    parser.add_argument("--src", type=Path, default=source, help="source folder  [default: src of this repository]")
    parser.add_argument("--repeat", type=int, default=5, help="number of repetitions  [default: 5]")
    parser.add_argument("--json", type=Path, help="also write the counts and file names to this file")
    parser.add_argument("--list", action="store_true", help="also print the files of each flow")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trace-flows-") as folder:
        runs = [watch(given.src.resolve(), Path(folder) / str(number)) for number in range(max(1, given.repeat))]
    report = {name: _summary([flows[name] for flows in runs], limit) for name, limit in LIMITS.items()}
    out = sys.stdout.write
    out(f"{'flow':<10}{'files':>6}{'limit':>7}{'foundations':>13}{'at least once':>15}\n")
    for name, flow in report.items():
        mark = "  too many" if len(flow["files"]) > flow["limit"] else ""
        counts = (len(flow["files"]), flow["limit"], len(flow["foundations"]), len(flow["at_least_once"]))
        out("{:<10}{:>6}{:>7}{:>13}{:>15}{}\n".format(name, *counts, mark))
    if given.list:
        for name, flow in report.items():
            out(f"\n{name}\n")
            for file in flow["at_least_once"]:
                mark = "  (foundation)" if file.startswith(FOUNDATIONS) else ""
                mark = mark if file in (*flow["files"], *flow["foundations"]) else "  (not every time)"
                out(f"  {file}{mark}\n")
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(any(len(flow["files"]) > flow["limit"] for flow in report.values()))


def _summary(repetitions: list[set[str]], limit: int) -> dict[str, Any]:
    always = sorted(set.intersection(*repetitions))
    return {
        "limit": limit,
        "files": [file for file in always if not file.startswith(FOUNDATIONS)],
        "foundations": [file for file in always if file.startswith(FOUNDATIONS)],
        "at_least_once": sorted(set.union(*repetitions)),
    }


if __name__ == "__main__":
    if NOTES in os.environ:
        train()
    else:
        main()
