"""The file of the script that a run's workers execute: a path, or with `-m` a module that is found without importing it."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

from holdfast.errors import BadInput
from holdfast.runs.config import RunConfig


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


def import_folder(config: RunConfig) -> Path:
    """Return the folder from which the script imports its own modules, as with `python script.py` or `python -m`."""
    return Path.cwd() if config.module else Path(config.script).resolve().parent


def module_file(name: str) -> Path | None:
    """Return the file that `python -m NAME` would run; None if there is none. No package is imported for this."""
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
