"""The README is short, and what it and the page of the lab name exists."""

import re

from holdfast.lab.registry import EXPERIMENTS
from repository import ROOT

README = (ROOT / "README.md").read_text()


def test_the_readme_has_at_most_900_words() -> None:
    assert len(README.split()) <= 900


def test_every_experiment_that_the_lab_page_runs_exists() -> None:
    named = set(re.findall(r"holdfast lab run ([\w-]+)", (ROOT / "docs/lab.md").read_text()))
    assert named
    assert named <= set(EXPERIMENTS)


def test_make_demo_and_make_test_are_in_the_readme_and_the_makefile() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert {"demo", "test"} <= set(targets) & set(re.findall(r"make (\w+)", README))
