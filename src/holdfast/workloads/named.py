"""Workloads by name, and a model of one's own by the path of the Python file that defines it."""

import inspect
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from holdfast.errors import BadInput, HoldfastError
from holdfast.extras import require
from holdfast.workloads.divided import Divided
from holdfast.workloads.workload import Workload

FUNCTION = "workload"  # what a file defines: from the data folder, or None, to the model


WORKLOADS: dict[str, tuple[str, str]] = {  # of each name the model and its data
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


def load_workload(name: str, data: Path | None = None) -> Divided:
    """The workload of a name, with the settings and the data that belong to it, or the model that a file defines."""
    if name in WORKLOADS:
        return _known(*WORKLOADS[name], data)
    if name.endswith(".py") or Path(name).is_file():
        return _own(Path(name), data)
    raise BadInput(f"there is no workload {name!r}; choose one of {', '.join(WORKLOADS)}, or give a Python file")


def _known(model: str, dataset: str, data: Path | None) -> Divided:
    # Imported here, because each brings a compiler or PyTorch, and the names alone need neither.
    if model == "mlr":
        from holdfast.workloads.mlr import mlr

        return mlr(dataset, data)
    require("lab", f"a workload such as {model}-{dataset}")
    if model == "mf":
        from holdfast.workloads.mf import mf

        return mf(dataset, data)
    if model == "lda":
        from holdfast.workloads.lda import lda

        return lda(dataset, data)
    from holdfast.workloads.cnn import cnn

    return cnn("shard", data, dataset=dataset)


def _own(path: Path, data: Path | None) -> Divided:
    """The model that a file defines."""
    make = getattr(_module(path), FUNCTION, None)
    if not callable(make):
        raise BadInput(f"{path} has no function {FUNCTION}(data) that returns the model: define it")
    try:
        return _checked(path, make(data))
    except HoldfastError:
        raise
    except Exception as error:
        raise BadInput(f"{path} cannot make its model: {_in_one_line(error)}") from error


def _module(path: Path) -> ModuleType:
    """The file, imported under a name of its own."""
    name = f"holdfast_workload_{path.stem}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise BadInput(f"there is no Python file {path}: give the path of the file that defines the model")
    module = sys.modules[name] = module_from_spec(spec)  # dataclasses look for their module there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadInput(f"{path} cannot be imported: {_in_one_line(error)}") from error
    return module


def _checked(path: Path, model: Any) -> Divided:
    """The model, if it has all that is asked of one, and no array that belongs to no block."""
    if missing := [name for name in _asked() if inspect.getattr_static(model, name, None) is None]:
        raise BadInput(f"the model of {path}, a {type(model).__name__}, lacks {', '.join(missing)}")
    divided = cast(Divided, model)
    if outside := sorted(set(divided.start()) - set(divided.blocks.members)):
        raise BadInput(f"array {outside[0]!r} of the model of {path} belongs to no block, so no node would hold it")
    return divided


def _asked() -> list[str]:
    """The functions and properties of both protocols."""
    return [name for protocol in (Workload, Divided) for name in vars(protocol) if not name.startswith("_")]


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
