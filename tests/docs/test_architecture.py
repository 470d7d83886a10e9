"""The architecture document agrees with the source: its packages, its files and its length."""

import re

from list_packages import ARCHITECTURE, MODULES, SOURCE, architecture, modules_page

TEXT = ARCHITECTURE.read_text()
STALE = "run `python tools/list_packages.py` (or `make format`)"


def test_packages_and_modules_are_those_of_the_source() -> None:
    assert architecture() == TEXT, STALE
    assert modules_page() == MODULES.read_text(), STALE


def test_every_file_that_it_names_exists() -> None:
    names = re.findall(r"`([\w/]+/\w+\.py)`", TEXT)
    assert len(names) > 30
    inside = [name for name in names if not name.startswith(("tests/", "tools/"))]
    assert [name for name in inside if not (SOURCE / name).exists()] == []


def test_every_name_that_it_gives_to_add_to_exists() -> None:
    for name, file in re.findall(r"`([A-Z]\w+)` (?:protocol )?in `([\w/]+\.py)`", TEXT):
        assert re.search(rf"\b{name}\b", (SOURCE / file).read_text()), f"{file} has no {name}"


def test_it_is_short() -> None:
    assert len(TEXT.split()) <= 2500
