"""How a served run stands, from its history alone: also of one that has ended, and from another machine.

A wish for more nodes, left in the folder of a run by somebody else and taken by whoever drives it.
"""

import os
from pathlib import Path
from typing import NamedTuple

from holdfast import events
from holdfast.errors import BadInput
from holdfast.history.log import read_history

NAME = "join"


class Status(NamedTuple):
    """The progress of a run, as its controller reports it to the driver."""

    iteration: int = 0
    loss: float | None = None
    seconds: float = 0.0
    saves: int = 0
    failures: int = 0
    wanted: tuple[str, int, int] | None = None  # the kind and the number of new members, and the number of the request


class ServerOutcome(NamedTuple):
    """The result of a run."""

    converged: bool
    iterations: int
    loss: float


class Wish:
    """How many nodes are to join a run: one wish at a time."""

    def __init__(self, out: Path) -> None:
        self._path = out / NAME

    def make(self, nodes: int) -> None:
        """Ask for so many more nodes."""
        if nodes < 1:
            raise BadInput(f"{nodes} nodes cannot join: give 1 or more")
        temporary = self._path.with_suffix(".new")
        temporary.write_text(str(nodes))
        os.replace(temporary, self._path)

    def take(self) -> int:
        """How many nodes are asked for; nobody else takes the same wish."""
        try:
            wanted = int(self._path.read_text())
            self._path.unlink()
        except (FileNotFoundError, ValueError):
            return 0
        return wanted


def standing(run: Path) -> list[str]:
    """A few lines for people."""
    told = _told(run)
    begun = [what for what in told if isinstance(what, events.Serve)]
    done = [what for what in told if isinstance(what, events.Iterate)]
    lost = [what for what in told if isinstance(what, events.Lost)]
    lines = [
        f"{begun[0].workload}: {begun[0].blocks} blocks on {_count(told, 'node')} nodes, {_count(told, 'worker')} workers"
    ]
    if done:
        last = done[-1]
        lines.append(
            f"iteration {last.iteration + 1}: loss {last.loss:.6g} (criterion {begun[0].criterion:.6g}), "
            f"{last.seconds * 1000:.0f} ms an iteration"
        )
    saves = [what for what in told if isinstance(what, events.Commit)]
    if saves:
        lines.append(f"{len(saves)} saves, the last after iteration {saves[-1].step}")
    lines += [f"lost in iteration {what.iteration}: {what.kind} {what.number}, {what.why}" for what in lost]
    lines.append("done" if any(isinstance(what, events.Done) for what in told) else "not done")
    return lines


def require_going_on(run: Path) -> None:
    """Refuse what is no served run, or one that has ended."""
    if any(isinstance(what, events.Done) for what in _told(run)):
        raise BadInput(f"the run in {run} is done: nobody can join it any more")


def _told(run: Path) -> list[events.What]:
    path = run / "history" / "controller.jsonl"
    if not path.is_file():
        raise BadInput(f"there is no served run in {run}: name the folder that `holdfast serve train --out` was given")
    told = [event.what for event in read_history(path).events]
    if not any(isinstance(what, events.Serve) for what in told):
        raise BadInput(f"the run in {run} has not begun to train yet: ask again in a moment")
    return told


def _count(told: list[events.What], kind: str) -> int:
    begun = next(what for what in told if isinstance(what, events.Serve))
    came = sum(isinstance(what, events.Joined) and what.kind == kind for what in told)
    gone = sum(isinstance(what, events.Lost) and what.kind == kind for what in told)
    return (begun.nodes if kind == "node" else begun.workers) + came - gone
