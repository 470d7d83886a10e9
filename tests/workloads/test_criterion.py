"""The criterion `LossAt` works for every kind of model: written for one state, for many, and for the parameter server."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.workloads.criterion import LossAt
from holdfast.workloads.registry import as_workload, load_for_lab, load_workload
from stacks_workload import Stacks

DIVIDED = """
import numpy as np
import holdfast as hf
from holdfast.workloads.divided import Push
from holdfast.workloads.model import Model

class Shrinking(Model):
    criterion = hf.lab.LossAt(6)

    def start(self, stream=0):
        return {"x": np.arange(1.0, 9.0)}

    def part(self, worker, workers):
        return 1 / workers

    def compute(self, part, when, pulled, summed):
        return Push(np.arange(8), {"x": -0.5 * part * pulled["x"]})

    def apply(self, when, ids, held, pushed):
        held["x"] += pushed["x"]

    def measure(self, part, pulled, summed):
        return part * float(np.abs(pulled["x"]).max())

def workload(data):
    return Shrinking()
"""


@pytest.fixture
def divided(tmp_path: Path) -> Path:
    (tmp_path / "shrinking.py").write_text(DIVIDED)
    return tmp_path / "shrinking.py"


def test_a_model_for_the_parameter_server_can_have_the_loss_at_an_iteration_as_its_criterion(divided: Path) -> None:
    for loaded in (load_workload(str(divided)), load_for_lab(str(divided))):
        assert loaded.criterion == pytest.approx(8 / 2**6)
        json.dumps(loaded.criterion)


def test_lab_check_and_lab_run_accept_such_a_model(divided: Path, tmp_path: Path) -> None:
    run = [
        "lab",
        "run",
        "partial-recovery",
        "--workload",
        str(divided),
        "--trials",
        "2",
        "--jobs",
        "1",
        "--interval",
        "2",
    ]
    for words in (["lab", "check", str(divided)], [*run, "--out", str(tmp_path / "out")]):
        ended = CliRunner().invoke(app, words)
        assert ended.exit_code == 0, ended.output


def test_a_workload_of_many_states_can_have_it_too() -> None:
    class Late(Stacks):
        criterion = LossAt(4)

    assert as_workload(Late(), "the model").criterion == pytest.approx(0.5)
