"""The script of a run: its file, and the modules that the supervisor imports for it once before it forks workers.

Nothing imported here may start a thread pool or a CUDA context: neither survives a fork.
"""

import ast
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path

from holdfast.errors import BadInput
from holdfast.runs.config import RunConfig

# Most of a cold start is torch itself and, when a model is first wrapped in DDP, the compiler behind it.
MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch.optim.lr_scheduler",
    "torch.utils.data",
    "torch._dynamo",
    "holdfast.train.attach",
    "holdfast.train.run",
)
# Slow to import and safe to fork afterwards. Lightning is not: when it is imported, it reads RANK, which each worker
# has for itself.
HEAVY = ("PIL", "datasets", "numpy", "pandas", "scipy", "sklearn", "torchaudio", "torchvision", "transformers")


def script_file(config: RunConfig) -> Path:
    """Return the absolute path of the script of a run; raise BadInput if there is no such file or module."""
    if not config.module:
        if not Path(config.script).is_file():
            raise BadInput(f"there is no script {config.script}: name a Python file, or a module with -m.")
        return Path(config.script).resolve()
    if file := module_file(config.script):
        return file
    raise BadInput(
        f"there is no module {config.script} that can be run with -m: start the command in the folder that holds its "
        "package, or name that folder in PYTHONPATH."
    )


def module_file(name: str) -> Path | None:
    """Return the file that `python -m NAME` would run, without importing any package; None if there is no such file."""
    places: list[str] = [str(Path.cwd()), *sys.path]
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:number]), places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())  # none in a module that is not a package
    if spec and spec.submodule_search_locations is not None:  # a package: its __main__ is run
        spec = PathFinder.find_spec(f"{name}.__main__", places)
    return Path(spec.origin).resolve() if spec and spec.origin else None


def warm(preload: Sequence[str] = (), beside: Path | None = None) -> None:
    """Import torch, the training code and the modules `preload`, which may be in the folder `beside`.

    Raise BadInput if a module of `preload` initializes CUDA."""
    # Then a module that only asks at import whether there is a GPU does not start CUDA to find out.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for name in MODULES:
        import_module(name)
    import_module("holdfast.train.attach").warm_up_math()  # for every worker at once
    path = list(sys.path)
    if beside:
        sys.path.insert(0, str(beside))
    try:
        for name in preload:
            import_module(name)
    except ImportError as error:
        raise BadInput(f"cannot import {name}, named by --preload: {error}.") from error
    finally:
        sys.path[:] = path
    files = Path("/proc/self/fd")  # torch only knows of its own CUDA context, not of another library's
    if files.exists() and any(os.path.realpath(file).startswith("/dev/nvidia-uvm") for file in files.iterdir()):
        raise BadInput(
            f"a module named by --preload ({', '.join(preload)}) starts CUDA, which does not survive a fork: drop it."
        )


def import_heavy(script: Path) -> list[str]:
    """Import the slow libraries (`HEAVY`) that `script` imports at its beginning.

    Return the names of the libraries that were not imported before."""
    names = [name for name in leading_imports(script) if name.partition(".")[0] in HEAVY and name not in sys.modules]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            with suppress(Exception):
                import_module(name)
    return [name for name in names if name in sys.modules]


def leading_imports(script: Path) -> list[str]:
    """Return the modules that `script` imports before its first other statement, except those in its own folder."""
    try:
        body = ast.parse(script.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):  # the worker reports it
        return []
    names: dict[str, None] = {}
    for statement in body:
        match statement:
            case ast.Import(names=aliases):
                names |= dict.fromkeys(alias.name for alias in aliases)
            case ast.ImportFrom(module=str(module), level=0):
                names[module] = None
            case ast.ImportFrom() | ast.Expr(value=ast.Constant()):
                continue
            case _:
                break
    tops = {name: script.parent / name.partition(".")[0] for name in names}
    return [name for name, path in tops.items() if not path.is_dir() and not path.with_suffix(".py").is_file()]
