"""Guards against scripts that fetch batches ahead, repeat a change that restored state contains, or make a loop too late."""

import ast
import copy
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from holdfast import progress
from holdfast.checkpoint.payload import flatten
from holdfast.errors import BadInput
from holdfast.progress import restart_needed
from holdfast.train.state.protected import Protected
from holdfast.train.state.state_digests import digest, tree_digest
from holdfast.train.step_log import Fingerprints, WorkDone

ONLY_SUPERVISED = (
    "holdfast: supervised only: these steps do not come from run.batches(). After a failure the script starts again, with "
    "checkpoints of its own if it keeps any; holdfast saves and checks nothing, protected or not."
)
_hook: Any = None
MAKERS = frozenset({"batches", "epochs", "steps", "stream"})  # methods of a run that make a loop


class FirstBatchCheck:
    """A check that the script does something with the first batch before it asks for the second.

    A request for a batch ends the previous step, and the state may then be saved as if its batch were trained. So a
    script that fetches batches ahead would lose a batch in a restart."""

    def __init__(self, fingerprints: Fingerprints, work: WorkDone) -> None:
        self._fingerprints, self._work = fingerprints, work
        self._before: str | None = None

    def begin(self) -> None:
        """Remember the protected state before the first batch."""
        self._before = self._fingerprints.take().digest()

    def check(self) -> None:
        """On the first call, raise BadInput if the script has neither trained nor changed a model since `begin`."""
        before, self._before = self._before, None
        if before is not None and self._work.is_idle and self._fingerprints.take().digest() == before:
            raise BadInput(
                "the second batch was asked for before anything was done with the first (no backward, no optimizer step, no "
                "change of a protected model): train each batch before asking for the next, as `for batch in "
                "run.batches(...)` does. A batch that is fetched ahead would be lost in a restart."
            )


class StateKeeper:
    """A guard that undoes changes of the protected state when a run resumes in the middle of an epoch.

    A script may change protected state before the batches of an epoch: it steps a scheduler, or sets a sum to 0. The
    state with which the process resumes already contains this change."""

    def __init__(self, protected: Protected, fingerprints: Fingerprints, restore_again: Callable[[], None]) -> None:
        self._protected, self._fingerprints, self._restore_again = protected, fingerprints, restore_again

    @contextmanager
    def keeping(self, *, has_joined: bool = False, copies: bool = False) -> Iterator[None]:
        """Return a context manager that undoes all changes of the protected state on exit.

        Plain values are restored from a copy made on entry, and so is all state if `copies`. Other state is restored from
        the snapshot. If `has_joined`, no snapshot has the state of this process: such a change makes the run restart."""
        before, copied = self._marks(), copy.deepcopy(self._protected.capture()) if copies else None
        yield
        now = self._marks()
        changed = [name for name in before if now.get(name) != before[name]]
        if copied is not None and changed:
            self._protected.restore(copied)
            return
        plain = self._protected.plain_names
        self._protected.restore_own({name: before[name] for name in changed if name in plain})
        if not (others := [name for name in changed if name not in plain]):
            return
        if has_joined:
            raise restart_needed(
                f"the script changes {' and '.join(others)} before the batches of an epoch, so a worker cannot join in the "
                "middle of the epoch (change it after the batches, or in a protected dict or list)"
            )
        self._restore_again()

    def _marks(self) -> dict[str, str]:
        """Return a text for each protected object that changes if the object does; for plain values, all their values."""
        weights = self._fingerprints.take().digest()
        marks = {name: tree_digest(flatten(state)) for name, state in self._protected.capture().items()}
        for name, thing in self._protected.things.items():
            if isinstance(thing, nn.Module):
                marks[name] += weights
        own_objects = self._protected.own_objects.items()
        return {
            **marks,
            **{name: digest(flatten(thing.state_dict())) for name, thing in own_objects},
            **self._protected.own(),
        }


def late_loop(script: Path) -> int | None:
    """Return the line number of the second loop over `run.batches(...)` in the script; None if there is only one."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    runs = {name for node in ast.walk(tree) if isinstance(node, ast.Assign) for name in _attached(node)}
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.FunctionDef) and isinstance(body, list):
            loops = [statement for statement in body if isinstance(statement, ast.For) and _makes(statement.iter, runs)]
            if len(loops) > 1:
                return loops[1].lineno
    return None


def _attached(assignment: ast.Assign) -> list[str]:
    """Return the names of the variables that `assignment` sets to the result of `attach()`."""
    call = assignment.value
    name = call.func if isinstance(call, ast.Call) else None
    called = name.attr if isinstance(name, ast.Attribute) else name.id if isinstance(name, ast.Name) else ""
    return [target.id for target in assignment.targets if isinstance(target, ast.Name)] if called == "attach" else []


def _makes(expression: ast.expr, runs: set[str]) -> bool:
    """Return True if the expression makes a training loop: it calls `batches` or the like on a variable in `runs`."""
    calls = (node.func for node in ast.walk(expression) if isinstance(node, ast.Call))
    return any(
        isinstance(call, ast.Attribute)
        and call.attr in MAKERS
        and isinstance(call.value, ast.Name)
        and call.value.id in runs
        for call in calls
    )


def watch_for_own_loop() -> None:
    """Make rank 0 warn if an optimizer steps before the script begins a loop of the run, such as `run.batches`.

    For such a script holdfast saves nothing and only restarts it after a failure."""
    global _hook
    _hook = register_optimizer_step_post_hook(_warn)


def loop_begins() -> None:
    """Cancel the warning of `watch_for_own_loop`, because the script has begun a loop of the run."""
    progress.here.is_checked = True
    _remove_hook()


def _warn(*_: Any) -> None:
    _remove_hook()
    progress.here.is_only_supervised = True
    if os.environ.get("RANK") == "0" and os.environ.get("HOLDFAST_ATTEMPT", "1") == "1":
        sys.stderr.write(f"{ONLY_SUPERVISED}\n")
        sys.stderr.flush()


def _remove_hook() -> None:
    global _hook
    if _hook is not None:
        _hook.remove()
        _hook = None
