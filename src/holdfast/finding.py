"""What a check can say of a run."""

from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from holdfast.events import Malformed

Verdict: TypeAlias = Literal["pass", "fail", "unknown"]
SHOWN = 3  # of a kind that are told one by one


class CannotTell(Exception):
    """The history does not hold what a check must know, so there is no verdict."""


def counted(number: int, noun: str) -> str:
    """So many of them, in words."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def where(what: "Malformed", file: str | None) -> str:
    """Where a line stands that does not say what it must, in brackets, if that is known."""
    return f" ({file}.jsonl, line {what.line})" if file is not None and what.line is not None else ""
