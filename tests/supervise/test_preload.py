"""Heavy libraries that a script begins with, and modules named by --preload, are imported before the fork."""

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import BadInput
from holdfast.supervise import preload
from holdfast.supervise.preload import import_heavy, leading_imports, warm


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Packages that do one thing or another when they are imported."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for name, text in {"heavy_one": "", "heavy_two": "", "light": "", "broken": "raise RuntimeError('no')"}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(preload, "HEAVY", ("heavy_one", "heavy_two", "broken", "not_installed"))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write_script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "script" / "train.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def test_imports_are_read_up_to_the_first_other_statement(tmp_path: Path) -> None:
    path = write_script(
        tmp_path,
        '''
        """A script."""
        from __future__ import annotations
        import os, numpy as np
        from sklearn.linear_model import Ridge
        from . import relative
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        import pandas
        ''',
    )
    assert leading_imports(path) == ["__future__", "os", "numpy", "sklearn.linear_model"]


def test_a_module_beside_the_script_hides_the_installed_library(tmp_path: Path) -> None:
    path = write_script(tmp_path, "import datasets.load\nimport pandas\nimport scipy")
    (path.parent / "datasets").mkdir()
    (path.parent / "pandas.py").write_text("")
    assert leading_imports(path) == ["scipy"]


def test_a_script_that_cannot_be_parsed_has_no_leading_imports(tmp_path: Path) -> None:
    assert leading_imports(write_script(tmp_path, "import (")) == []
    assert leading_imports(tmp_path / "no.py") == []


def test_only_libraries_of_the_list_are_imported_and_one_that_raises_is_left_to_the_worker(
    tmp_path: Path, installed: Path
) -> None:
    path = write_script(tmp_path, "import heavy_one, light, broken, not_installed\nfrom heavy_two import x")
    assert import_heavy(path) == ["heavy_one", "heavy_two"]
    assert "light" not in sys.modules
    assert import_heavy(path) == []


def test_a_module_beside_the_script_can_be_preloaded(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preload, "MODULES", ())
    path = write_script(tmp_path, "import beside_only")
    (path.parent / "beside_only.py").write_text("")
    with pytest.raises(BadInput, match="cannot import beside_only"):
        warm(["beside_only"])
    before = list(sys.path)
    warm(["beside_only"], path.parent)
    assert "beside_only" in sys.modules
    assert sys.path == before
