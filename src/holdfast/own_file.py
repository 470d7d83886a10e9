"""Import a Python file of the user, which may import the other files of its folder as a script does."""

import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from holdfast.code_digest import source_files
from holdfast.errors import BadInput

_contents: dict[Path, bytes] = {}  # the files that were imported here, and what was in them


def import_file(path: Path) -> ModuleType:
    """Import and return the Python file `path`, with its folder first on `sys.path`; reload files that have changed."""
    given, path = path, path.absolute()
    name = f"holdfast_own_{path.stem}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise BadInput(f"There is no Python file {given}: give the path of a file that exists.")
    if sys.path[0] != str(path.parent):
        sys.path.insert(0, str(path.parent))  # not removed again: functions may import when they are called
    _forget_other_versions({file: file.read_bytes() for file in source_files(path)})
    module = sys.modules[name] = module_from_spec(spec)  # dataclasses look for their module there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadInput(f"{given} cannot be imported: {in_one_line(error)}") from error
    return module


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
