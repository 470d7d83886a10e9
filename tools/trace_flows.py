"""Counts how many files of holdfast are entered in each of five flows, by watching real runs.

    python tools/trace_flows.py [--src DIR] [--repeat N] [--json FILE] [--list]

A file is entered when a function in it is called, or a generator in it goes on. A flow lasts from one moment to another:

batch    from the call of `run.batches` to the first batch in the script, in rank 1 (rank 0 begins its first save there)
save     from the end of the step after which a save is due to its `commit` event, in rank 0
restart  from the kill of rank 1 to the last `recover` event, in all processes
forward  from the kill of rank 1, with `--recovery forward`, to the first `regroup` event, in all processes
audit    all of `holdfast audit`, of the run that was restarted

Everything is run several times, and what counts is the files that a flow enters every time. Beside it stands how many it
enters at least once: that adds what merely happens at the same moment, such as a look at the clock by a supervisor.

Nothing here knows how the package is laid out, so trees before and after a change of layout can be compared. What must
keep its name: the commands `run` and `audit` with `--workers`, `--recovery`, `--save-every` and `--out`; `attach`,
`replicate`, `protect` and `batches`; and the events. This file is also the script that is trained.
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

LIMITS = {"batch": 16, "save": 14, "restart": 26, "forward": 20, "audit": 18}
STEPS, SAVE_EVERY, KILL_AT, BATCH = 100, 20, 70, 16  # the kill is between two saves
DEADLINE = 180.0  # seconds for one command: each takes some 10 to 20
CALLS, PACKAGE, NOTES, KILLS = "TRACE_FLOWS_CALLS", "TRACE_FLOWS_PACKAGE", "TRACE_FLOWS_NOTES", "TRACE_FLOWS_KILLS"


def train() -> None:
    """Train a small network and note the moments that limit the flows; rank 1 kills itself once, if it is told to."""
    import torch

    import holdfast

    run = holdfast.attach()
    data = torch.utils.data.TensorDataset(torch.randn(STEPS * BATCH, 16), torch.randint(4, (STEPS * BATCH,)))
    model = run.replicate(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters())
    run.protect(model=model, optimizer=optimizer)
    size = next(name for name in inspect.signature(run.batches).parameters if name.startswith("global_batch"))
    options: dict[str, Any] = {size: BATCH, "epochs": 1}
    kills = os.environ["RANK"] == "1" and os.environ[KILLS] == "1" and "kill" not in {each["what"] for each in noted()}
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
    """Kill this process, and note when; by then the other rank waits for this one in the same backward."""
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
    """Read a file of JSON lines; a last line that a killed process left unfinished is passed over."""
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


class Watched:
    """One command of holdfast that was run to its end, with every call into the package written down."""

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
        """Read what the script noted of this kind on this rank."""
        found = [each for each in lines_of(self.folder / "notes.jsonl") if (each["what"], each["rank"]) == (what, rank)]
        return found or sys.exit(f"{self.folder.name}: the script of rank {rank} noted no {what!r}")

    def events(self, kind: str, after: float = 0.0) -> list[dict[str, Any]]:
        """Read the events of this kind since a moment, in the order of time."""
        every = (each for path in (self.folder / "run" / "history").glob("*.jsonl") for each in lines_of(path))
        found = sorted((each for each in every if each["event"] == kind and each["time"] > after), key=_time)
        return found or sys.exit(f"{self.folder.name}: no event {kind!r} is in the history")

    def entered(self, begin: float = 0.0, end: float = float("inf"), pid: int | None = None) -> list[str]:
        """List the files that were entered between two moments, by one process or by all."""
        found = set()
        for path in (self.folder / "calls").glob("*.txt" if pid is None else f"{pid}.txt"):
            for line in path.read_text().splitlines(keepends=True):
                at, _, name = line.partition(" ")
                if name.endswith("\n") and begin <= float(at) <= end:
                    found.add(name.rstrip("\n"))
        return sorted(found)


def _time(event: dict[str, Any]) -> float:
    return float(event["time"])


def watch(src: Path, folder: Path) -> dict[str, list[str]]:
    """Run everything once, and list the files that each flow enters."""

    def run(name: str, recovery: str, *, kills: bool) -> Watched:
        options = ["--workers", "2", "--recovery", recovery, "--save-every", str(SAVE_EVERY), "--out", "run"]
        return Watched(src, folder / name, "run", *options, str(Path(__file__).resolve()), kills=kills)

    flows = {}
    plain = run("plain", "restart", kills=False)
    called, first = plain.notes("batches", 1)[0], plain.notes("first", 1)[0]
    flows["batch"] = plain.entered(called["time"], first["time"], called["pid"])

    commits = plain.events("commit")
    commit = commits[len(commits) // 2]
    due = next(each for each in plain.notes("end", 0) if each["count"] == commit["step"])
    flows["save"] = plain.entered(due["time"], commit["time"], due["pid"])

    restart = run("restart", "restart", kills=True)
    kill = restart.notes("kill", 1)[0]["time"]
    flows["restart"] = restart.entered(kill, restart.events("recover", kill)[-1]["time"])

    forward = run("forward", "forward", kills=True)
    kill = forward.notes("kill", 1)[0]["time"]
    flows["forward"] = forward.entered(kill, forward.events("regroup", kill)[0]["time"])

    flows["audit"] = Watched(src, folder / "audit", "audit", str(restart.folder / "run")).entered()
    return flows


def main() -> None:
    """Print how many files each flow enters, and exit with 1 if that is more than its limit."""
    parser = argparse.ArgumentParser(description="Count how many files of holdfast are entered in each of five flows.")
    source = Path(__file__).resolve().parent.parent / "src"
    parser.add_argument("--src", type=Path, default=source, help="folder of the package  [default: of this repository]")
    parser.add_argument("--repeat", type=int, default=5, help="how often everything is run  [default: 5]")
    parser.add_argument("--json", type=Path, help="write what was found to this file, too")
    parser.add_argument("--list", action="store_true", help="print the files of each flow, too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trace-flows-") as folder:
        times = [watch(given.src.resolve(), Path(folder) / str(number)) for number in range(max(1, given.repeat))]
    always = {name: sorted(set.intersection(*(set(flows[name]) for flows in times))) for name in LIMITS}
    ever = {name: sorted(set.union(*(set(flows[name]) for flows in times))) for name in LIMITS}
    exceeded = [name for name, limit in LIMITS.items() if len(always[name]) > limit]
    out = sys.stdout.write
    out(f"{'flow':<10}{'files':>6}{'limit':>7}{'at least once':>15}\n")
    for name, limit in LIMITS.items():
        mark = "  too many" if name in exceeded else ""
        out(f"{name:<10}{len(always[name]):>6}{limit:>7}{len(ever[name]):>15}{mark}\n")
    if given.list:
        for name in LIMITS:
            marked = (f"  {each}{'' if each in always[name] else '  (not every time)'}\n" for each in ever[name])
            out(f"\n{name}\n{''.join(marked)}")
    if given.json:
        found = {
            name: {"limit": limit, "count": len(always[name]), "files": always[name], "at_least_once": ever[name]}
            for name, limit in LIMITS.items()
        }
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(1 if exceeded else 0)


if __name__ == "__main__":
    if NOTES in os.environ:
        train()
    else:
        main()
