"""The messages that the page on troubleshooting quotes are those of the program."""

import re
from collections.abc import Iterator
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

import holdfast
from holdfast.audit.snapshot_checks import snapshots_hold_every_row_once
from holdfast.audit.verdicts import CHECKS
from repository import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
QUOTED = re.findall(r"^> (.*)", PAGE, flags=re.M)


@cache
def texts_of_the_source() -> str:
    """Return all text literals of the source, one per line; literals that Python joins are joined."""
    paths = Path(holdfast.__file__).parent.rglob("*.py")
    codes = (SourceFileLoader(path.stem, str(path)).get_code(path.stem) for path in paths)
    return "\n".join(text for code in codes for text in texts(code))


def texts(constant: object) -> Iterator[str]:
    """Yield the text literals in a constant of compiled code: a text, a tuple, or the code of a module or function."""
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, CodeType | tuple):
        for inner in constant.co_consts if isinstance(constant, CodeType) else constant:
            yield from texts(inner)


def test_every_quoted_message_is_in_the_source() -> None:
    pieces = [piece.strip(" ,") for quote in QUOTED for piece in quote.split("...")]
    assert len(QUOTED) > 10
    missing = [piece for piece in pieces if piece and not piece.startswith("audit: ")]
    assert [piece for piece in missing if piece not in texts_of_the_source()] == []


def test_messages_in_tables_are_in_the_source() -> None:
    for message in (
        "was suspended for",
        "the disk is full: waiting up to",
        "this is a limit of the machine",
        "is not possible here",
    ):
        assert f"`{message}`" in PAGE
        assert message in texts_of_the_source()


def test_every_check_of_the_audit_is_explained_and_no_other() -> None:
    table = PAGE.partition("| check that failed |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| ([a-z, ]+) \|", table, flags=re.M)
    named = [name.replace(" ", "_") for cell in cells for name in cell.split(", ")]
    assert sorted(named) == sorted([*CHECKS, snapshots_hold_every_row_once.__name__])
