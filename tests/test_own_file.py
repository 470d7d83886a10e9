"""A Python file of the user imports the other files of its folder, and these files do not replace installed packages."""

import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from holdfast.libraries import is_of_library
from holdfast.own_file import import_file


@pytest.fixture(autouse=True)
def same_path() -> Iterator[None]:
    path = list(sys.path)
    yield
    sys.path[:] = path


def folder_with(folder: Path, **files: str) -> Path:
    """Write the files `files` (module name and text) to `folder`; return the path of `own.py` in it."""
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder / "own.py"


def test_while_the_file_is_imported_the_files_beside_it_come_before_installed_packages(tmp_path: Path) -> None:
    own = folder_with(tmp_path, own="import this\nz = this.z", this="z = 3")
    assert import_file(own).z == 3
    del sys.modules["this"]


def test_after_the_import_a_file_beside_it_does_not_hide_an_installed_package(tmp_path: Path) -> None:
    import_file(folder_with(tmp_path, own="", numpy="", sqlite3=""))
    for name in ("numpy", "sqlite3"):
        spec = PathFinder.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        assert is_of_library(spec.origin), spec.origin


def test_a_function_that_imports_when_it_is_called_gets_the_file_beside_its_own(tmp_path: Path) -> None:
    text = "def value():\n    from beside_own import value\n    return value"
    first = import_file(folder_with(tmp_path / "a", own=text, beside_own="value = 1"))
    assert first.value() == 1
    second = import_file(folder_with(tmp_path / "b", own=text, beside_own="value = 2"))
    assert second.value() == 2


def test_a_script_that_loads_a_file_of_its_own_folder_keeps_its_path(tmp_path: Path) -> None:
    sys.path.insert(0, str(tmp_path))
    before = list(sys.path)
    import_file(folder_with(tmp_path, own=""))
    assert sys.path == before
