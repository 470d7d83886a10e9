"""The code of installed packages and of Python's standard library, which is not the code of the user."""

import sysconfig
from functools import cache
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
