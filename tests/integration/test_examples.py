"""The examples are plain PyTorch scripts with at most five lines changed, and they train alone and under a supervisor."""

import random
import re
import runpy
import sys

import pytest

from finished_run import different, failed_checks
from repository import EXAMPLES, lines
from supervisor_process import Start

ARGUMENTS = {
    "digits": ["--epochs", "1"],
    "language": ["--sentences", "6", "--batch", "16"],
    "mnist": ["--epochs", "3", "--batch", "200"],
    "elastic": ["--epochs", "3", "--batch", "256"],
}
ALONE = ("digits", "language", "mnist")  # the plain form of the other one needs torchrun
CHANGED = 5


@pytest.mark.parametrize("name", ARGUMENTS)
def test_at_most_five_lines_of_the_plain_script_are_changed(name: str) -> None:
    ours, plain = lines(name), lines(f"{name}_plain")
    new = [line for line in ours if line not in plain]
    gone = [line for line in plain if line not in ours]
    assert len(new) == CHANGED, new
    if name != "elastic":  # what it does for torchrun, and its snapshots, go
        assert len(gone) <= CHANGED, gone
    assert [line for line in ours if line not in new] == [line for line in plain if line not in gone]


@pytest.mark.parametrize("script", [f"{name}{form}.py" for name in ALONE for form in ("_plain", "")])
def test_it_trains_alone(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    name = script.removesuffix(".py").removesuffix("_plain")
    monkeypatch.setattr(sys, "argv", [script, *ARGUMENTS[name]])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert re.search(r"\d digits recognized|perplexity \d", capsys.readouterr().out)


@pytest.mark.parametrize(("name", "steps"), [("language", 12), ("mnist", 21), ("elastic", 24)])
def test_killed_twice_at_random_it_ends_with_the_bits_of_a_run_that_never_failed(
    start: Start, name: str, steps: int
) -> None:
    seed = random.randrange(1 << 32)
    killed = sorted(random.Random(seed).sample(range(1, steps), 2))
    how = {"script": EXAMPLES / f"{name}.py", "args": ARGUMENTS[name], "workers": 2, "save_every": 5}
    reference = start(out="reference", **how)
    job = start(failures=[{"step": step, "kind": "kill", "targets": [1]} for step in killed], **how)
    for each in (reference, job):
        assert each.result().get("verdict") == "completed", (seed, each.stderr)
    assert different(reference.out, job.out) == [], seed
    assert failed_checks(job.out) == [], seed
