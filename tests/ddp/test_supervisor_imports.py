"""What a script imports is learned from its text, tried apart, and taken over to workers only if a fork survives it."""

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import BadInput
from holdfast.supervise import learned, trial
from holdfast.supervise import preload as module
from holdfast.supervise.imports import imports_of
from holdfast.supervise.learned import import_for
from holdfast.supervise.preload import warm
from holdfast.supervise.trial import tried

PACKAGES = {
    "plain_one": "VALUE = 1",
    "plain_two": "import plain_one",
    "with_thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "with_rank": "import os\nRANK = os.environ.get('RANK', '0')",
    "with_copy": "import os\nALL = dict(os.environ); HOME = os.environ.get('HOME')",
    "of_rank": "import with_rank",
    "broken": "raise RuntimeError('no')",
    "leaves": "import sys\nsys.exit(3)",
    "loud": "print('hello'); import warnings; warnings.warn('old')",
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages that do one thing or another when they are imported."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for name, text in PACKAGES.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(learned, "WORTH", 0.0)
    before = set(sys.modules)
    yield folder  # type: ignore[misc]
    for name in set(sys.modules) - before:
        del sys.modules[name]


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "script" / "train.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def test_imports_are_read_from_the_top_of_a_script_and_of_what_lies_beside_it(tmp_path: Path, installed: Path) -> None:
    path = script(
        tmp_path,
        """
        from __future__ import annotations
        import os, sys, plain_one as one
        import holdfast as hf
        import beside
        from package.inner import thing
        import nowhere
        try:
            from plain_two import plain_one
        except ImportError:
            pass
        if len(sys.argv) > 100:
            import broken
        def later():
            import leaves
            os.environ["A"] = "1"
        """,
    )
    (path.parent / "beside.py").write_text("import with_copy\nimport train\nfrom . import other")
    (path.parent / "package").mkdir()
    (path.parent / "package" / "__init__.py").write_text("import loud")
    (path.parent / "package" / "inner.py").write_text("thing = 1\nimport plain_one")
    found = imports_of(path)
    assert found == [
        "import plain_one as one",
        "import with_copy",
        "import loud",
        "import plain_one",
        "from plain_two import plain_one",
    ]


@pytest.mark.parametrize(
    "prepares",
    [
        "os.environ['TOKENIZERS_PARALLELISM'] = 'false'",
        "os.environ.setdefault('A', 'b')",
        "sys.path.insert(0, '..')",
        "with open('x'): os.putenv('A', 'b')",
        "load_dotenv()",
    ],
)
def test_imports_after_a_line_that_prepares_them_are_the_workers_own(
    tmp_path: Path, installed: Path, prepares: str
) -> None:
    path = script(tmp_path, f"import os, sys\nimport plain_one\n{prepares}\nimport plain_two\n")
    assert imports_of(path) == ["import plain_one"]
    (path.parent / "beside.py").write_text(f"import os, sys\n{prepares}\n")
    assert imports_of(script(tmp_path, "import beside\nimport plain_one")) == []


def test_what_lies_beside_the_script_comes_before_what_is_installed(tmp_path: Path, installed: Path) -> None:
    path = script(tmp_path, "import plain_one\nimport plain_two")
    (path.parent / "plain_one.py").write_text("")
    (path.parent / "plain_two").mkdir()
    assert imports_of(path) == []
    assert imports_of(script(tmp_path, "import (")) == []
    assert imports_of(tmp_path / "no.py") == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("with_thread", "it starts threads"),
        ("with_rank", "it reads RANK, which every worker has for itself"),
        ("of_rank", "it reads RANK, which every worker has for itself"),
        ("broken", "it raises RuntimeError"),
        ("leaves", "it raises SystemExit"),
        ("loud", None),
        ("with_copy", None),
    ],
)
def test_a_trial_finds_what_workers_cannot_be_forked_with(installed: Path, name: str, why: str | None) -> None:
    found = tried(["import plain_one", f"import {name}", "import plain_two"])
    assert found.why == why
    assert len(found.seconds) == (3 if why is None else 2)
    assert "plain_one" not in sys.modules


def test_what_is_safe_is_imported_and_what_is_not_is_said(
    tmp_path: Path, installed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    path = script(tmp_path, "import plain_one\nimport with_rank\nimport of_rank\nimport loud\nimport plain_two")
    import_for(path, said.append)
    assert [name for name in PACKAGES if name in sys.modules] == ["plain_one", "plain_two", "loud"]
    assert said[0].startswith("every start of a worker imports with_rank anew (0.0 s): it reads RANK")
    assert said[1].startswith("every start of a worker imports of_rank anew")
    assert said[2].startswith("imported plain_one, loud, plain_two once for all workers")
    assert capfd.readouterr().out == "hello\n"  # once: a trial is silent


def test_a_trial_is_remembered_until_something_is_installed(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tried(["import plain_one", "import with_thread"])
    (file,) = (tmp_path / "cache").rglob("*.json")

    def refuse(*_: Any) -> None:
        raise AssertionError("tried again")

    with monkeypatch.context() as patch:
        patch.setattr(trial, "Aside", refuse)
        assert tried(["import plain_one", "import with_thread"]) == first
        (installed / "newcomer.py").write_text("")
        with pytest.raises(AssertionError, match="tried again"):
            tried(["import plain_one", "import with_thread"])
    for lie in ("", "[]", json.dumps([[0.1], None]), json.dumps([["x"], "why"]), json.dumps([[], "why"])):
        file.write_text(lie)
        assert tried(["import plain_one", "import with_thread"]).why == first.why


def test_a_module_beside_the_script_can_be_preloaded(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MODULES", ())
    path = script(tmp_path, "import beside_only")
    (path.parent / "beside_only.py").write_text("")
    with pytest.raises(BadInput, match="cannot import beside_only"):
        warm(["beside_only"])
    before = list(sys.path)
    warm(["beside_only"], path.parent)
    assert "beside_only" in sys.modules
    assert sys.path == before
