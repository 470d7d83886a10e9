"""What a check can say of a run."""

from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["pass", "fail", "unknown"]
SHOWN = 3  # of a kind that are told one by one


class CannotTell(Exception):
    """The history does not hold what a check must know, so there is no verdict."""


def counted(number: int, noun: str) -> str:
    """So many of them, in words."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
