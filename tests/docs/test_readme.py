"""The README and the guides are true: their Python runs and prints what they show, and what they name exists."""

import re
from pathlib import Path

import pytest

from holdfast.lab.registry import EXPERIMENTS
from repository import ROOT

README = (ROOT / "README.md").read_text()
PAGES = ["README.md", "docs/training.md", "docs/running.md"]


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs_and_prints_what_it_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.S):
        exec(block, {})
        assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*# (.*)", block)


def test_the_readme_has_at_most_900_words() -> None:
    assert len(README.split()) <= 900


def test_every_experiment_that_the_lab_page_runs_exists() -> None:
    named = set(re.findall(r"holdfast lab run ([\w-]+)", (ROOT / "docs/lab.md").read_text()))
    assert named
    assert named <= set(EXPERIMENTS)


def test_make_demo_and_make_test_are_in_the_readme_and_the_makefile() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert {"demo", "test"} <= set(targets) & set(re.findall(r"make (\w+)", README))
