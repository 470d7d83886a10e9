"""The modules of the package, and what each imports, read from their source text."""

import ast
from functools import cache
from pathlib import Path

from repository import ROOT

SOURCE = ROOT / "src"


@cache
def modules() -> dict[str, Path]:
    """Return the file of every module by its dotted name; a package's is its `__init__.py`."""
    paths = {path.relative_to(SOURCE).with_suffix("").parts: path for path in sorted(SOURCE.rglob("*.py"))}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for parts, path in paths.items()}


@cache
def imported(source: str) -> frozenset[str]:
    """Return the modules of the package that a source text imports, at its top or inside a function."""
    known, names = modules(), set[str]()
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.Import):
            names |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            inside = {f"{statement.module}.{alias.name}" for alias in statement.names}
            names |= inside & known.keys() or {statement.module}
    return frozenset(names & known.keys())
