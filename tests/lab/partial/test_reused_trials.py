"""A trial is reused only if the code that produced it is the same, and the result says so."""

from pathlib import Path

import pytest

from holdfast.lab.experiment import Options, Progress
from holdfast.lab.partial import partial_recovery
from holdfast.lab.result import Result
from holdfast.workloads.registry import load_for_lab

MODEL = """
import numpy as np
import helper

class Halving:
    criterion = 0.01

    def start(self, rng):
        return {"x": np.full(8, 8.0)}

    def step(self, state, rng):
        x = state["x"]
        mixed = x.max() > 1.5 * x.min()  # only after a failure, so a run without one never shows the difference
        return {"x": x * (helper.SLOW if mixed else 0.5)}

    def loss(self, state):
        return float(np.abs(state["x"]).max())

def workload(data):
    return Halving()
"""


def silent(label: str, total: int) -> Progress:
    return lambda done: None


def measured(folder: Path, out: Path) -> Result:
    options = Options(trials=6, interval=4, out=out, workload=load_for_lab(str(folder / "model.py")))
    return partial_recovery.EXPERIMENT.measure(options, silent)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "helper.py").write_text("SLOW = 0.6\n")
    return tmp_path


@pytest.mark.parametrize("edited", ["model.py", "helper.py"])
def test_a_model_whose_code_changed_never_gets_the_costs_of_its_old_code(folder: Path, edited: str) -> None:
    before = measured(folder, folder / "out")
    path = folder / edited
    path.write_text(path.read_text().replace("helper.SLOW if", "0.95 if").replace("0.6", "0.95"))
    after, expected = measured(folder, folder / "out"), measured(folder, folder / "new")
    assert repr(after.rows) == repr(expected.rows) != repr(before.rows)
    assert any("are not used, because the code" in remark for remark in after.remarks)


def test_trials_of_the_same_code_are_reused_and_the_result_says_how_many_and_where(folder: Path) -> None:
    before = measured(folder, folder / "out")
    assert not any("reused" in remark for remark in before.remarks)
    after = measured(folder, folder / "out")
    assert repr(after.rows) == repr(before.rows)
    (remark,) = [remark for remark in after.remarks if "reused" in remark]
    assert "trials/halving.jsonl" in remark


def test_trials_are_kept_inside_the_folder_of_the_result(folder: Path) -> None:
    measured(folder, folder / "out")
    assert (folder / "out" / "trials" / "halving.jsonl").exists()
    assert not (folder / "trials").exists()
