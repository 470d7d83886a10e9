"""Output that commands share: lines of progress where there is no terminal."""

import pytest

from holdfast.cli.console import LINE_EVERY, progress_lines


def test_without_a_terminal_progress_is_a_line_now_and_then_with_rate_and_remaining_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [100.0]
    advance = progress_lines("training steps", 1000, clock=lambda: now[0])
    advance(100)
    assert not capsys.readouterr().err
    now[0] += LINE_EVERY
    advance(50)
    now[0] += LINE_EVERY / 2
    advance(50)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "training steps: 150 of 1,000, 10 a second, 85 s left"
