"""The examples are plain PyTorch scripts with at most five lines changed, and they train alone and under a supervisor."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from final import complaints, different
from supervised import Start

EXAMPLES = Path(__file__).parents[2] / "examples"
ARGUMENTS = {"digits": ["--epochs", "1"], "language": ["--sentences", "6", "--batch", "16"]}
CHANGED = 5


def lines(name: str) -> list[str]:
    """The lines of an example, without their indentation, which goes with the loop over epochs."""
    return [stripped for line in (EXAMPLES / f"{name}.py").read_text().splitlines() if (stripped := line.strip())]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_at_most_five_lines_of_the_plain_script_are_changed(name: str) -> None:
    ours, plain = lines(name), lines(f"{name}_plain")
    new = [line for line in ours if line not in plain]
    gone = [line for line in plain if line not in ours]
    assert len(new) == CHANGED, new
    assert len(gone) <= CHANGED, gone
    assert [line for line in ours if line not in new] == [line for line in plain if line not in gone]


@pytest.mark.parametrize("script", [f"{name}{form}.py" for name in ARGUMENTS for form in ("_plain", "")])
def test_it_trains_alone(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    name = script.removesuffix(".py").removesuffix("_plain")
    monkeypatch.setattr(sys, "argv", [script, *ARGUMENTS[name]])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as many as there are would slow each other down, beside other tests
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    torch.set_num_threads(threads)
    assert re.search(r"\d digits recognized|perplexity \d", capsys.readouterr().out)


def test_killed_and_restarted_it_ends_with_the_bits_of_a_run_that_never_failed(start: Start) -> None:
    how = {"script": EXAMPLES / "language.py", "args": ARGUMENTS["language"], "workers": 2, "save_every": 5}
    reference = start(out="reference", **how)
    job = start(failures=[{"step": 8, "kind": "kill", "targets": [1]}], **how)
    for each in (reference, job):
        assert each.result().get("verdict") == "completed", each.said
    assert different(reference.out, job.out) == []
    assert complaints(job.out) == []
