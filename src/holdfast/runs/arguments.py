"""The arguments of a script, and the differences between the arguments of two commands.

An option begins with a dash: `--lr 0.1`, `--lr=0.1`, or a flag. Every other argument is identified by its position.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeGuard

_OPTION = re.compile(r"--?[A-Za-z]")
_LENGTH = re.compile(r"epoch|step|iter", re.IGNORECASE)
_WHOLE_LENGTH = re.compile(r"-*((num|n|max|total|train)[-_])*(epochs?|steps?|iters?|iterations?)", re.IGNORECASE)


class Change(NamedTuple):
    """A script argument that differs between two commands; `was` or `now` is None if that command lacks it."""

    name: str
    was: str | None
    now: str | None

    def __str__(self) -> str:
        if self.was is None or self.now is None:
            given = self.now if self.was is None else self.was
            value = f" {given}" if given else ""
            return f"{self.name}{value} is {'new' if self.was is None else 'gone'}"
        return f"{self.name} was {self.was or 'a flag'}, not {self.now or 'a flag'}"

    @property
    def lengthens(self) -> bool:
        """True if the change may make a run longer: a larger whole number, or a new number of epochs or steps."""
        if not _is_whole(self.now):
            return False
        if self.was is None:
            return _LENGTH.search(self.name) is not None
        return _is_whole(self.was) and int(self.now or 0) > int(self.was)

    @property
    def shortens(self) -> bool:
        """True if the change makes a run shorter: a smaller number of epochs or steps, as in `--max-steps`."""
        is_less = _is_whole(self.was) and _is_whole(self.now) and int(self.now) < int(self.was)
        return is_less and _WHOLE_LENGTH.fullmatch(self.name) is not None


def changes(before: Sequence[str], now: Sequence[str]) -> list[Change]:
    old, new = _by_name(before), _by_name(now)
    names = dict.fromkeys([*old, *new])
    return [Change(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)]


def name_all(differences: Sequence[Change]) -> str:
    """Return the text "argument --lr was 0.1, not 0.2" for all `differences`."""
    text = "; ".join(map(str, differences))
    return text if text.startswith("argument ") else f"argument {text}"  # an argument by position has this name already


def plain(name: str) -> str:
    """Return an argument name in one spelling: without leading dashes, and with `-` instead of `_`."""
    return name.strip().lstrip("-").replace("_", "-").replace(" ", "-")


def _is_whole(value: str | None) -> TypeGuard[str]:
    return value is not None and value.isascii() and value.isdigit()


def _by_name(args: Sequence[str]) -> Mapping[str, str]:
    named: dict[str, str] = {}
    waiting: str | None = None
    places = 0
    for arg in args:
        if _OPTION.match(arg):
            name, equals, value = arg.partition("=")
            named[name] = value
            waiting = None if equals else name
        elif waiting is not None:
            named[waiting] = f"{named[waiting]} {arg}".strip()  # an option may take several values
        else:
            places += 1
            named[f"argument {places}"] = arg
    return named
