"""Workloads by name, and your own models by the path of the Python file that defines them.

A file has a function `workload(data)`. For the parameter server it returns a divided model, see `DividedWorkload`; for the lab
a `Workload`, or a model that is written for one state at a time, see `OneState`.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from traceback import format_exception
from typing import Any, cast

from holdfast.code_digest import code_digest, object_digest
from holdfast.errors import BadInput, HoldfastError
from holdfast.extras import require
from holdfast.own_file import import_file, in_one_line
from holdfast.workloads.criterion import Wrapper, with_number
from holdfast.workloads.divided import DividedWorkload
from holdfast.workloads.simple_model import ASKED, OneStateAdapter
from holdfast.workloads.workload import Workload

WORKLOADS: dict[str, tuple[str, str]] = {  # the model and the data set of each name
    "mlr-digits": ("mlr", "digits"),
    "mlr-mnist": ("mlr", "mnist"),
    "mlr-covtype": ("mlr", "covtype"),
    "mf-generated": ("mf", "generated"),
    "mf-movielens": ("mf", "movielens"),
    "mf-jester": ("mf", "jester"),
    "lda-generated": ("lda", "generated"),
    "lda-20news": ("lda", "newsgroups20"),
    "lda-20news-200": ("lda", "newsgroups20-200"),
    "lda-reuters": ("lda", "reuters"),
    "cnn-digits": ("cnn", "digits"),
    "cnn-mnist": ("cnn", "mnist"),
}


def load_workload(name: str, data: Path | None = None) -> DividedWorkload:
    """Return the parameter-server workload called `name`, or the workload that the Python file `name` defines."""
    if name in WORKLOADS:
        return _known(*WORKLOADS[name], data)
    if not name.endswith(".py") and not Path(name).is_file():
        raise BadInput(f"There is no workload {name!r}: choose one of {', '.join(WORKLOADS)}, or give a Python file.")
    model = _made(Path(name), data)
    if _has(model, "step") and not _has(model, "advance"):
        raise BadInput(
            f"the model of {name}, a {type(model).__name__}, is for the lab: the parameter server divides a model among workers "
            "and nodes, so it needs one that inherits from holdfast.workloads.model.Model, as in examples/kmeans.py."
        )
    if lacks := [needed for needed in _asked(Workload, DividedWorkload) if not _has(model, needed)]:
        raise BadInput(f"the model of {name}, a {type(model).__name__}, lacks {', '.join(lacks)}")
    divided = cast(DividedWorkload, with_number(model))
    if outside := sorted(set(divided.start()) - set(divided.blocks.members)):
        raise BadInput(f"array {outside[0]!r} of the model of {name} belongs to no block, so no node would hold it.")
    return divided


def load_for_lab(name: str, data: Path | None = None) -> Workload:
    """Return the workload called `name` for simulations, or the workload that the Python file `name` defines."""
    if name in WORKLOADS:
        return _known(*WORKLOADS[name], data)
    if name.endswith(".py") or Path(name).is_file():
        return cast(Workload, _FromFile(Path(name).absolute(), data))
    raise BadInput(f"There is no workload {name!r}: choose one of {', '.join(WORKLOADS)}, or give a Python file.")


def as_workload(model: Any, whose: str) -> Workload:
    """Return `model` as a workload; raise BadInput if it lacks an attribute that a workload needs.

    The message calls the model by `whose`, such as "the model of cnn.py"."""
    asked = ASKED if _has(model, "step") and not _has(model, "advance") else _asked(Workload)
    if lacks := [name for name in asked if not _has(model, name)]:
        hint = "" if _has(model, "advance") else f" (a model for one state at a time has {', '.join(ASKED)})"
        raise BadInput(f"{whose}, a {type(model).__name__}, lacks {', '.join(lacks)}{hint}")
    return cast(Workload, with_number(model)) if _has(model, "advance") else OneStateAdapter(model)


def code_of(workload: Workload) -> str:
    """Return a digest of the source code of a workload, of its imported files, and of holdfast."""
    return workload.code if isinstance(workload, Wrapper) else object_digest(workload)


def own_error(traceback: str, workload: str) -> str | None:
    """Return a one-line message if the error in `traceback` came from the user's file `workload`, otherwise None."""
    if not workload.endswith(".py"):
        return None
    file = re.escape(Path(workload).name)
    places = re.findall(rf'File "[^"]*{file}", line (\d+), in (\w+)', traceback)
    if not places:
        return None
    (line, function), what = places[-1], traceback.strip().splitlines()[-1].strip()
    return f"{workload} failed in {function}, line {line}: {what}"


@contextmanager
def own_errors(workload: str) -> Iterator[None]:
    """Convert exceptions raised in the user's file `workload` to BadInput with a one-line message."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        if line := own_error("".join(format_exception(error)), workload):
            raise BadInput(line) from error
        raise


class _FromFile(Wrapper):
    """A workload defined by a Python file; pickling stores only the path of the file."""

    def __init__(self, path: Path, data: Path | None) -> None:
        super().__init__(as_workload(_made(path, data), f"the model of {path.name}"))
        self._path, self._data = path, data

    @property
    def code(self) -> str:
        return code_digest(self._path)

    def __reduce__(self) -> tuple[type["_FromFile"], tuple[Path, Path | None]]:
        return _FromFile, (self._path, self._data)


def _known(model: str, dataset: str, data: Path | None) -> DividedWorkload:
    if model != "mlr":
        require("lab", f"a workload such as {model}-{dataset}")
    # Imported here, because some models bring a compiler or PyTorch, and the names alone need neither.
    make: Callable[..., DividedWorkload] = getattr(import_module(f"holdfast.workloads.{model}"), model)
    return make(dataset, data)


def _made(path: Path, data: Path | None) -> Any:
    make = getattr(import_file(path), "workload", None)
    if not callable(make):
        raise BadInput(f"{path} has no function workload(data): define one that returns the model.")
    try:
        return make(data)
    except HoldfastError:
        raise
    except Exception as error:
        raise BadInput(f"{path} cannot make its model: {in_one_line(error)}") from error


def _has(model: Any, name: str) -> bool:
    return inspect.getattr_static(model, name, None) is not None


def _asked(*protocols: type) -> list[str]:
    return [name for protocol in protocols for name in vars(protocol) if not name.startswith("_")]
