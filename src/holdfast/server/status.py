"""The progress and result of a run, the injected failures that killed no process, and a file that requests more nodes."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast import events
from holdfast.atomic_write import write_atomically
from holdfast.errors import BadInput
from holdfast.faults.schedule import Schedule
from holdfast.finding import counted
from holdfast.history.log import read_history


class Status(NamedTuple):
    """The progress of a run; `wanted` is the controller's request for new members: (kind, count, request number)."""

    iteration: int = 0
    loss: float | None = None
    seconds: float = 0.0
    saves: int = 0
    failures: int = 0
    wanted: tuple[str, int, int] | None = None  # the kind and the number of new members, and the number of the request


class ServerOutcome(NamedTuple):
    converged: bool
    iterations: int
    loss: float


class JoinRequest:
    """A file in the run's folder that requests more server nodes.

    `holdfast serve join` writes it, and the driver reads it."""

    def __init__(self, out: Path) -> None:
        self._path = out / "join"

    def write(self, nodes: int) -> None:
        if nodes < 1:
            raise BadInput(f"--nodes must be at least 1 (got {nodes}).")
        write_atomically(self._path, str(nodes).encode(), self._path.with_suffix(".new"))

    def take(self) -> int:
        try:
            wanted = int(self._path.read_text())
            self._path.unlink()
        except (FileNotFoundError, ValueError):
            return 0
        return wanted


def summary(run: Path) -> list[str]:
    recorded = _events(run)
    plan = next(what for what in recorded if isinstance(what, events.Serve))
    iterations = [what for what in recorded if isinstance(what, events.Iterate)]
    lost = [what for what in recorded if isinstance(what, events.Lost)]
    joined = Counter(what.kind for what in recorded if isinstance(what, events.Joined))
    gone = Counter(what.kind for what in lost)
    nodes, workers = plan.nodes + joined["node"] - gone["node"], plan.workers + joined["worker"] - gone["worker"]
    lines = [f"{plan.workload}: {plan.blocks} blocks on {nodes} nodes, {workers} workers"]
    if iterations:
        last = iterations[-1]
        loss = "" if last.loss is None else f"loss {last.loss:.6g} (criterion {plan.criterion:.6g}), "
        lines.append(f"iteration {last.iteration + 1}: {loss}which took {last.seconds * 1000:.0f} ms")
    saves = [what for what in recorded if isinstance(what, events.Commit) and what.is_new]
    if saves:
        lines.append(f"{counted(len(saves), 'save')}, the last after iteration {saves[-1].step}")
    lines += [f"lost in iteration {what.iteration}: {what.kind} {what.number}, {what.why}" for what in lost]
    lines.append("done" if any(isinstance(what, events.Done) for what in recorded) else "not done")
    return lines


def missed_kills(failures: Schedule, history: Iterable[events.What], iterations: int) -> Iterator[str]:
    """Yield a line for each process in `failures` that was not killed in a run of `iterations` iterations.

    `history` has the events that the controllers of the run recorded."""
    recorded = list(history)
    lost = {(what.kind, what.number): what.iteration for what in recorded if isinstance(what, events.Lost)}
    strikes = [what for what in recorded if isinstance(what, events.Struck)]
    killed = {(what.iteration, what.kind, target, what.point) for what in strikes for target in what.targets}
    for failure in failures:
        step, kind = failure.step, failure.kind
        if step >= iterations:
            yield f"no process was killed at iteration {step}: the run had ended before"
            continue
        for target in failure.targets:
            if (step, kind, target, failure.point) in killed:
                continue
            who = "the controller" if kind == "controller" else f"{kind} {target}"
            before = lost.get((kind, target))
            if before is not None and before <= step:
                why = f"it was lost in iteration {before}, and a {kind} that replaces it has a new number"
            else:
                why = f"the run did not come to the point '{failure.point}' in this iteration"
            yield f"{who} was not killed at iteration {step}: {why}"


def losses(run: Path) -> list[str]:
    """Return a line for each node and worker lost so far, and one for the blocks restored in each iteration."""
    lines: list[str] = []
    restored: Counter[int] = Counter()
    for what in _events(run):
        if isinstance(what, events.Lost):
            lines.append(f"{what.kind} {what.number} was lost in iteration {what.iteration}: {what.why}")
        elif isinstance(what, events.Restored):
            restored[what.iteration] += len(what.blocks)
        elif isinstance(what, events.Iterate) and (count := restored.pop(what.iteration, 0)):
            lines.append(f"{counted(count, 'block')} restored; iteration {what.iteration} is done")
    return lines


def require_running(run: Path) -> None:
    if any(isinstance(what, events.Done) for what in _events(run)):
        raise BadInput(f"The run in {run} has ended, so no node can join it.")


def _events(run: Path) -> list[events.What]:
    path = run / "history" / "controller.jsonl"
    if not path.is_file():
        hint = "Name the folder given to `holdfast serve train --out`."
        raise BadInput(f"There is no parameter server run in {run}. {hint}")
    recorded = [event.what for event in read_history(path).events]
    if not any(isinstance(what, events.Serve) for what in recorded):
        raise BadInput(f"The run in {run} has not begun to train. Try again in a moment.")
    return recorded
