"""A model of one's own: one file that the simulator and the server both take, and what a bad one is told."""

import re
from pathlib import Path

import numpy as np
import pytest

from holdfast.errors import BadInput
from holdfast.lab.partial.panels import PANELS
from holdfast.lab.simulate.lanes import trajectory
from holdfast.workloads.local_server import SimulatedServer
from holdfast.workloads.registry import WORKLOADS, load_workload
from holdfast.workloads.workload import Clock, stacked, unstacked
from repository import EXAMPLES

KMEANS = EXAMPLES / "kmeans.py"

MEAN = '''
import numpy as np
from holdfast.workloads.divided import Push
from holdfast.workloads.model import Model

class Mean(Model):
    """Move half way to the mean of some numbers."""
    criterion = 1e-3
    numbers = np.arange(12.0)
    def start(self, stream=0): return {"x": np.zeros(3), "steps": np.array(0)}
    def part(self, worker, workers): return self.numbers[worker::workers]
    def compute(self, part, when, pulled, summed):
        pull = (part.sum() - len(part) * pulled["x"]) / len(self.numbers)
        return Push(np.arange(4), {"x": pull / 2, "steps": np.array(1 if len(part) else 0)})
    def apply(self, when, ids, held, pushed):
        for name, value in pushed.items(): held[name][...] += value
    def measure(self, part, pulled, summed): return float(np.abs(part.sum() - len(part) * pulled["x"]).sum())

def workload(data): return Mean()
'''


def file(folder: Path, text: str) -> str:
    path = folder / "model.py"
    path.write_text(text)
    return str(path)


class TestTheExample:
    def test_runs_both_ways_alike(self) -> None:
        ours = load_workload(str(KMEANS))
        rounds = SimulatedServer(ours, workers=3, owners=np.arange(10) % 2)
        state, stack = ours.start(), stacked([ours.start()])
        for iteration in range(8):
            assert rounds.loss(state) == pytest.approx(ours.loss(stack)[0], rel=1e-12)
            state = rounds.advance(state, iteration)
            stack = ours.advance(stack, Clock(np.array([iteration]), np.array([0])))
            np.testing.assert_allclose(state["centres"], unstacked(stack, 0)["centres"], rtol=1e-12)

    def test_converges(self) -> None:
        assert trajectory(load_workload(str(KMEANS)), limit=20).length == 7

    def test_runs_as_the_readme_beside_it_says(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(KMEANS.parent.parent)
        (block,) = re.findall(r"```python\n(.*?)```", (KMEANS.parent / "README.md").read_text(), flags=re.S)
        exec(block, {})
        assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*# (.*)", block)

    def test_fits_a_screen(self) -> None:
        assert len(KMEANS.read_text().splitlines()) < 60


class TestAModel:
    def test_has_all_it_did_not_write(self, tmp_path: Path) -> None:
        ours = load_workload(file(tmp_path, MEAN))
        assert (ours.name, ours.lanes, ours.rounds, ours.stochastic, ours.steady) == ("mean", 1, 1, False, False)
        assert [ours.blocks.name(block) for block in range(4)] == ["x[0]", "x[1]", "x[2]", "steps"]
        assert ours.pulls(ours.part(0, 1), 0).tolist() == [0, 1, 2, 3]
        assert ours.norm(ours.blocks, ours.start(), {"x": np.ones(3), "steps": np.array(2)}).tolist() == [1, 1, 1, 2]

    def test_advances_every_trial_of_a_stack(self, tmp_path: Path) -> None:
        ours = load_workload(file(tmp_path, MEAN))
        stack = stacked([ours.start(), {"x": np.full(3, 5.5), "steps": np.array(3)}])
        after = ours.advance(stack, Clock(np.array([0, 3]), np.array([0, 0])))
        assert after["x"].tolist() == [[2.75, 5.5]] * 3
        assert after["steps"].tolist() == [1, 4]
        assert ours.loss(after).tolist() == [99, 0]

    def test_in_rounds_is_what_it_is_alone(self, tmp_path: Path) -> None:
        ours = load_workload(file(tmp_path, MEAN))
        alone = ours.advance(stacked([ours.start()]), Clock(np.array([0]), np.array([0])))
        divided = SimulatedServer(ours, workers=3, owners=np.array([0, 1, 0, 2])).advance(ours.start(), 0)
        np.testing.assert_allclose(divided["x"], alone["x"][:, 0], rtol=1e-15)
        assert divided["steps"] == 3  # of three workers


class TestAFile:
    def test_without_the_function_that_makes_the_model_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match=r"model\.py has no function workload\(data\)"):
            load_workload(file(tmp_path, "x = 1"))

    @pytest.mark.parametrize("missing", ["criterion", "start", "part", "compute", "apply", "measure"])
    def test_whose_model_lacks_a_function_is_told_which(self, tmp_path: Path, missing: str) -> None:
        text = f"{MEAN}\ndel Mean.{missing}"
        with pytest.raises(BadInput, match=rf"^the model of .*model\.py, a Mean, lacks {missing}$"):
            load_workload(file(tmp_path, text))

    def test_whose_model_is_none_of_ours_is_told_all_that_is_missing(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match=r"a NoneType, lacks name, criterion, .* rounds, part, .* measure, total$"):
            load_workload(file(tmp_path, "def workload(data): return None"))

    def test_whose_model_is_for_the_lab_alone_is_told_what_the_server_needs(self, tmp_path: Path) -> None:
        text = "class Own:\n    def step(self, state, rng): return state\ndef workload(data): return Own()"
        with pytest.raises(
            BadInput, match=r"a Own, is for the lab: .* inherits from holdfast\.workloads\.model\.Model"
        ):
            load_workload(file(tmp_path, text))

    def test_with_an_array_that_belongs_to_no_block_is_refused(self, tmp_path: Path) -> None:
        text = (
            f"{MEAN}\nfrom holdfast.blocks import along\nMean.blocks = property(lambda self: along(self.start(), 'x'))"
        )
        with pytest.raises(BadInput, match=r"array 'steps' of the model of .* belongs to no block"):
            load_workload(file(tmp_path, text))

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("import nothing_of_the_kind", "cannot be imported: ModuleNotFoundError: No module named"),
            ("def (", "cannot be imported: SyntaxError: invalid syntax"),
            ("def workload(data): return 1 / 0", "cannot make its model: ZeroDivisionError: division by zero"),
            ("def workload(): return 1", "cannot make its model: TypeError: workload\\(\\) takes 0 positional"),
        ],
    )
    def test_that_fails_is_told_why_in_one_line(self, tmp_path: Path, text: str, told: str) -> None:
        with pytest.raises(BadInput, match=told) as refused:
            load_workload(file(tmp_path, text))
        assert "\n" not in str(refused.value)

    def test_that_is_not_there_is_said_not_to_be(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match=r"There is no Python file .*absent\.py"):
            load_workload(str(tmp_path / "absent.py"))

    def test_is_given_the_data_folder(self, tmp_path: Path) -> None:
        text = f"{MEAN}\ndef workload(data):\n    Mean.name = str(data)\n    return Mean()"
        assert load_workload(file(tmp_path, text), tmp_path).name == str(tmp_path)


class TestANameOfOurs:
    @pytest.mark.parametrize("name", ["mlr-digits", "mf-generated", "lda-generated", "cnn-digits"])
    def test_is_that_of_the_workload(self, name: str) -> None:
        assert load_workload(name).name == name

    def test_is_that_of_the_panel_in_the_lab(self) -> None:
        assert {name for name in PANELS if not name.startswith("cnn")} <= set(WORKLOADS)
        assert "cnn-mnist" in WORKLOADS

    def test_that_there_is_not_is_told_those_there_are(self) -> None:
        with pytest.raises(
            BadInput, match=r"no workload 'mlr-iris': choose one of mlr-digits, .* or give a Python file"
        ):
            load_workload("mlr-iris")
