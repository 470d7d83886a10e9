"""The code of installed packages and of Python's standard library, which is not the code of the user."""

import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

_INSTALLED = {"site-packages", "dist-packages"}  # names of the folders into which packages are installed


@cache
def is_of_library(file: str | Path) -> bool:
    """Return True if `file` belongs to Python, to PyTorch or to another installed package.

    Packages are not only in the folder of this interpreter: a virtual environment may see those of the system, a user
    may have installed some with `pip install --user`, and PyTorch may be a build from source."""
    path = Path(file)
    return not _INSTALLED.isdisjoint(path.parts) or not _folders().isdisjoint(path.parents)


@cache
def _folders() -> frozenset[Path]:
    standard = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    torch = find_spec("torch")
    built = {Path(place) for place in (torch.submodule_search_locations if torch else None) or ()}
    return frozenset(spelling for folder in standard | built for spelling in (folder, folder.resolve()))


def hiding_files() -> Iterator[tuple[str, str]]:
    """Yield the name and the file of each imported module of the user that has the name of an installed package.

    Imports of the package then get the file instead, so other packages may fail."""
    folders = [folder for folder in sys.path if is_of_library(Path(folder) / "package")]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or "." in name or name == "holdfast" or is_of_library(file):
            continue
        if PathFinder.find_spec(name, folders) is not None:
            yield name, file
