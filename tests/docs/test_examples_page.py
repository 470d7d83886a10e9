"""The page of the examples lists every script, and each is short."""

import re

from repository import EXAMPLES

PAGE = (EXAMPLES / "README.md").read_text()
LONGEST = 110  # lines


def test_every_example_is_listed_with_a_link() -> None:
    linked = {*re.findall(r"\]\(([\w/]+\.py)\)", PAGE)}
    assert {path.name for path in EXAMPLES.glob("*.py")} - linked == set()
    assert [name for name in linked if not (EXAMPLES / name).exists()] == []


def test_every_example_is_short_and_compiles() -> None:
    for path in EXAMPLES.glob("*.py"):
        compile(path.read_text(), path.name, "exec")
        assert len(path.read_text().splitlines()) <= LONGEST, path.name
