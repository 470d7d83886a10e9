"""The verdict of a check, and words that all checks use."""

from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from holdfast.events import Malformed

Verdict: TypeAlias = Literal["pass", "fail", "unknown"]
SHOWN = 3  # items of a list that a finding names


class CannotTell(Exception):
    """The history does not hold what a check needs, so its verdict is unknown."""


def counted(number: int, noun: str) -> str:
    """Return the number with the noun in singular or plural."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def where(what: "Malformed", file: str | None) -> str:
    """Return the file and line of a malformed event in brackets, if they are known."""
    return f" ({file}.jsonl, line {what.line})" if file is not None and what.line is not None else ""
