"""The arguments of two commands are compared by name."""

import pytest

from holdfast.runs.arguments import Change, changes, plain


@pytest.mark.parametrize(
    ("before", "now", "lines"),
    [
        ("--lr 0.1 --epochs 3", "--epochs 3 --lr 0.1", []),
        ("--lr 0.1", "--lr=0.1", []),
        ("--lr 0.1 --epochs 3", "--lr 0.2 --epochs 5", ["--lr was 0.1, not 0.2", "--epochs was 3, not 5"]),
        ("--amp", "", ["--amp is gone"]),
        ("", "--log-interval 10", ["--log-interval 10 is new"]),
        ("data/a out", "data/b out", ["argument 1 was data/a, not data/b"]),
        ("--sizes 3 4 --lr -0.5", "--sizes 3 5 --lr -0.5", ["--sizes was 3 4, not 3 5"]),
        ("--amp", "--amp bf16", ["--amp was a flag, not bf16"]),
    ],
)
def test_commands_differ_in_named_arguments(before: str, now: str, lines: list[str]) -> None:
    assert [str(change) for change in changes(before.split(), now.split())] == lines


@pytest.mark.parametrize(
    ("was", "now", "longer"), [("3", "5", True), ("5", "3", False), ("0.1", "0.2", False), ("5", None, False)]
)
def test_whole_numbers_may_grow(was: str | None, now: str | None, longer: bool) -> None:
    assert Change("--any", was, now).lengthens is longer


@pytest.mark.parametrize(
    ("name", "longer"), [("--epochs", True), ("--max_steps", True), ("--iters", True), ("--hidden", False)]
)
def test_a_length_that_was_the_default_before_may_have_grown(name: str, longer: bool) -> None:
    assert Change(name, None, "5").lengthens is longer


def test_a_user_may_write_a_name_without_dashes() -> None:
    assert {plain(name) for name in ("--log-interval", "log_interval", "log-interval")} == {"log-interval"}
    assert plain("argument 1") == "argument-1"
