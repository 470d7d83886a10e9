"""What a script imports of installed packages, read from its text: nothing of it is run.

Only statements at the top of a file count, of the script and of the modules beside it. Those modules themselves are not
named: their text may change between two starts, and what they do when they are imported is the script's own business.
Nor is anything that comes after a line that prepares imports, such as one that sets an environment variable.
"""

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

INSTALLED = {"site-packages", "dist-packages"}
_PREPARES = {"environ", "putenv", "unsetenv", "load_dotenv"}
_PREPARES_OF_SYS = {"path", "modules", "meta_path"}
_FILES = 100  # modules beside the script that are looked into


def imports_of(script: Path) -> list[str]:
    """The import statements of installed packages that running this script begins with, in order, each once."""
    return list(dict.fromkeys(_Reading(script.parent).of(script)))


class _Reading:
    """What is read of a script and the modules beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[Path] = set()
        self._over = False

    def of(self, path: Path) -> Iterator[str]:
        """The statements of one file, and of those that it imports from beside the script."""
        if path in self._seen or len(self._seen) > _FILES:
            return
        self._seen.add(path)
        try:
            body = ast.parse(path.read_bytes()).body
        except (OSError, SyntaxError, ValueError, RecursionError):  # the worker says what is wrong with it
            return
        for statement in _flat(body):
            if self._over or _prepares(statement):
                self._over = True
                return
            if isinstance(statement, ast.Import):
                for each in statement.names:
                    yield from self._import(each.name, ast.unparse(ast.Import([each])))
            elif isinstance(statement, ast.ImportFrom) and not statement.level and statement.module:
                yield from self._import(statement.module, ast.unparse(statement))

    def _import(self, module: str, text: str) -> Iterator[str]:
        top = module.partition(".")[0]
        if top in sys.stdlib_module_names or top in ("__future__", "holdfast"):
            return
        if beside := self._beside(module):
            for path in beside:
                yield from self.of(path)
        elif _is_installed(top):
            yield text

    def _beside(self, module: str) -> list[Path]:
        """The files of a module that lies beside the script, if it does: those of its packages come first."""
        found: list[Path] = []
        place = self._folder
        for name in module.split("."):
            place /= name
            found += [path for path in (place / "__init__.py", place.with_name(f"{name}.py")) if path.is_file()]
        top = self._folder / module.partition(".")[0]
        return found or ([top] if top.is_dir() else [])


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a file, and those that it only tries."""
    for statement in body:
        if isinstance(statement, ast.Try):
            yield from statement.body
        else:
            yield statement


def _prepares(statement: ast.stmt) -> bool:
    """Whether a line may change what the imports after it mean; what functions and classes do, they do later."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
        return False
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute):
            of_sys = isinstance(node.value, ast.Name) and node.value.id == "sys" and node.attr in _PREPARES_OF_SYS
            if of_sys or node.attr in _PREPARES:
                return True
        elif isinstance(node, ast.Name) and node.id in _PREPARES:
            return True
    return False


def _is_installed(top: str) -> bool:
    try:
        found = PathFinder.find_spec(top)
    except (ImportError, ValueError):
        return False
    places = [*(found.submodule_search_locations or ()), found.origin or ""] if found else []
    return any(part in INSTALLED for place in places for part in Path(place).parts)
