"""A loop that a script leaves by break or return is told from one that an exception ends."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress

import pytest

from holdfast.train.loop_checks import left_in_order

seen: list[bool] = []


def windows() -> Iterator[int]:
    try:
        yield from range(5)
    except GeneratorExit:
        seen.append(left_in_order(sys._getframe()))
        raise


def bar(windows: Iterable[int]) -> Iterator[int]:
    """As a progress bar does."""
    for each in windows:
        shown = each
        yield shown


def broken() -> None:
    for _ in windows():
        break


def broken_later() -> int:
    for each in windows():
        if each == 2:
            break
    return 1


def returned() -> int | None:
    for each in windows():
        return each
    return None


def broken_through_others() -> None:
    for _, _ in enumerate(bar(windows())):
        break


def broken_within() -> None:
    for _ in range(1):
        with nullcontext():
            try:
                for _ in windows():
                    break
            finally:
                seen.append(True)


def raised() -> None:
    for _ in windows():
        raise ValueError


def raised_through_others() -> None:
    for _, _ in enumerate(bar(windows())):
        raise ValueError


def raised_from_a_variable() -> None:
    held = windows()
    for _ in held:
        raise ValueError


@pytest.mark.parametrize("script", [broken, broken_later, returned, broken_through_others, broken_within])
def test_break_and_return_leave_in_order(script: Callable[[], object]) -> None:
    seen.clear()
    script()
    assert seen
    assert all(seen)


@pytest.mark.parametrize("script", [raised, raised_through_others, raised_from_a_variable])
def test_an_exception_does_not(script: Callable[[], object]) -> None:
    seen.clear()
    with suppress(ValueError):
        script()
    assert seen == [False]
