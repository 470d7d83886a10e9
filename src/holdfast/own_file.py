"""Import a Python file of the user, which may import the other files of its folder as a script does."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from holdfast.code_digest import source_files
from holdfast.errors import BadInput

_contents: dict[Path, bytes] = {}  # the files that were imported here, and what was in them
_folders: list[str] = []  # their folders, newest first


def import_file(path: Path) -> ModuleType:
    """Import and return the Python file `path`, which may import files of its folder; reload files that have changed."""
    given, path = path, path.absolute()
    name = f"holdfast_own_{path.stem}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise BadInput(f"There is no Python file {given}: give the path of a file that exists.")
    _forget_other_versions({file: file.read_bytes() for file in source_files(path)})
    module = sys.modules[name] = module_from_spec(spec)  # dataclasses look for their module there
    try:
        with _first_on_path(str(path.parent)):
            spec.loader.exec_module(module)
    except Exception as error:
        raise BadInput(f"{given} cannot be imported: {in_one_line(error)}") from error
    return module


@contextmanager
def _first_on_path(folder: str) -> Iterator[None]:
    """Put `folder` first on `sys.path`, as Python does for a script, and afterwards behind the installed packages.

    The folder stays on the path, because functions may import when they are called. At its end, a file such as `attr.py`
    does not hide the package `attr` from other code."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        if folder in _folders or folder not in sys.path:
            _folders[:] = [folder, *(other for other in _folders if other != folder)]
            sys.path[:] = [other for other in sys.path if other not in _folders] + _folders


def in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _forget_other_versions(files: dict[Path, bytes]) -> None:
    """Remove from `sys.modules` the older versions of `files`, and other user files with the same module names."""
    changed = any(_contents.get(file, content) != content for file, content in files.items())
    stems = {file.stem for file in files}
    for name, module in list(sys.modules.items()):
        file = _resolved(getattr(module, "__file__", None) or "")
        if file in _contents and (changed if file in files else file.stem in stems):
            del sys.modules[name]
    _contents.update(files)


@cache
def _resolved(file: str) -> Path:
    """Return the path of a module's file without links. A process has thousands of modules, and each takes system calls."""
    return Path(file).resolve()
