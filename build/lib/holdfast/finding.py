"""The verdict of an audit check, and helpers for the wording of its finding."""

from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from holdfast.events import Malformed

Verdict: TypeAlias = Literal["pass", "fail", "unknown"]
SHOWN = 3  # items of a list that a finding names


class CannotTell(Exception):
    """Raised when the history lacks data that a check needs, so that its verdict is unknown."""


def counted(number: int, noun: str) -> str:
    """Return the number followed by the noun, with an `s` unless the number is 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def where(what: "Malformed", file: str | None) -> str:
    """Return the file and line of a malformed event in parentheses, or "" if they are not known."""
    return f" ({file}.jsonl, line {what.line})" if file is not None and what.line is not None else ""
