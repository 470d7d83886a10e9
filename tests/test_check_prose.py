"""The check of prose finds what hides the subject of a sentence, and leaves plain English alone."""

from pathlib import Path

import pytest
from check_prose import main, problems

PLAIN = '''
"""The newest verified snapshot. Nothing here is trained; what is saved, and how, is in `save`."""


class Worker:
    """A worker process, one of `count`. It reports how far it is, and whether it has ended."""


def ends(worker: Worker) -> bool:
    """Return True if the worker has ended. A worker that is told to stop ends within seconds."""
    # Those snapshots that are pinned stay; each worker keeps one that it can restore.
    texts = {"told", "so", "whoever"}
    return all(worker in texts for worker in (worker,))
'''


def test_plain_english_passes() -> None:
    assert problems(PLAIN) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""What is saved."""', "'What'"),
        ('def f():\n    """Whether it ended."""', "'Whether'"),
        ('class A:\n    """One that waits."""', "'One that'"),
        ('def f():\n    """Return so many workers."""', "'so many'"),
        ("x = 1  # nobody waits for it", "'nobody'"),
        ('raise ValueError(f"{x} is trained by whoever is left")', "'whoever'"),
        ("for each in workers: pass", "'each'"),
        ("found = [each for each in workers]", "'each'"),
        ("told = read()", "'told'"),
        ("def f(several): pass", "'several'"),
    ],
)
def test_a_hidden_subject_is_found(source: str, found: str) -> None:
    assert any(found in str(problem) for problem in problems(source)), problems(source)


def test_a_problem_names_its_line_and_a_line_can_be_kept() -> None:
    source = '"""Two words.\n\nFor whoever reads.\n"""\nx = "nobody is there"  # prose: keep\n'
    assert [(problem.line, problem.text) for problem in problems(source, "a.py")] == [
        (3, "'whoever': name the subject")
    ]


def test_the_command_lists_problems_and_counts_them_by_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "holdfast/train").mkdir(parents=True)
    (tmp_path / "holdfast/train/loop.py").write_text("told = 1\n")
    assert main([str(tmp_path)]) == 1
    assert "loop.py:1: a variable is named 'told'" in capsys.readouterr().out
    assert main(["--count", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == ["     1 holdfast/train", "1 problems in 1 files"]
    (tmp_path / "holdfast/train/loop.py").write_text("report = 1\n")
    assert main([str(tmp_path)]) == 0
