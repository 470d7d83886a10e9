"""A digest of the source code that decides how a workload trains, so that results of older code are not reused."""

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any
from uuid import uuid4

from xxhash import xxh3_128

from holdfast.libraries import is_of_library

_PACKAGE = Path(__file__).resolve().parent


def code_digest(*sources: Path) -> str:
    """Return a digest of the code of holdfast, of the files `sources`, and of the files that they import.

    Installed packages are left out: their files do not change while a user works on a model."""
    digest = xxh3_128(_package_digest())
    for path in sorted(source_files(*sources)):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def modules_digest(*names: str) -> str:
    """Return a digest of the source files of the modules `names` of holdfast, without those that they import."""
    digest = xxh3_128()
    for name in sorted(names):
        path = _PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py")
        digest.update(name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def object_digest(model: Any) -> str:
    """Return a digest of the source files of the classes of `model`, or a random digest if a class has no file."""
    sources = set()
    for cls in type(model).__mro__:
        if cls.__module__ == "builtins":
            continue
        try:
            sources.add(Path(inspect.getfile(cls)).resolve())
        except (OSError, TypeError):  # typed at a prompt: its code is unknown
            return uuid4().hex
    return code_digest(*(path for path in sources if path.exists() and not _is_outside(path)))


@cache
def _package_digest() -> bytes:
    digest = xxh3_128()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


def source_files(*sources: Path) -> set[Path]:
    """Return `sources` and all files that they import, directly or not, anywhere in their code."""
    found, todo = set[Path](), [path.resolve() for path in sources]
    while todo:
        if (path := todo.pop()) not in found:
            found.add(path)
            todo += _imported(path)
    return found


def _imported(path: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # a compiled module has no source to read
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(alias.name, [str(path.parent), *sys.path])
        elif isinstance(node, ast.ImportFrom):
            base, names = node.module or "", [alias.name for alias in node.names]
            start = [str(path.parents[node.level - 1])] if node.level else [str(path.parent), *sys.path]
            for name in names:
                yield from _files(f"{base}.{name}" if base else name, start)


def _files(dotted: str, where: list[str]) -> Iterator[Path]:
    """Yield the source files of the module `dotted`, such as `a.b.c`, and of the packages that contain it.

    The first package is searched in the folders `where`. Files of holdfast and of installed packages are left out."""
    search: list[str] | None = where
    for name in dotted.split("."):
        spec = PathFinder.find_spec(name, search) if search else None
        if spec is None:
            return
        if spec.origin and (path := Path(spec.origin).resolve()).is_file() and not _is_outside(path):
            yield path
        search = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)


def _is_outside(path: Path) -> bool:
    return _PACKAGE in path.parents or is_of_library(path)
