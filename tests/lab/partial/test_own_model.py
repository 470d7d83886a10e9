"""The user's own model, written as in docs/workloads.md, is checked, compared and reported like the paper's models."""

import csv
import json
import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import app
from holdfast.errors import BadInput
from holdfast.lab import result_page
from holdfast.lab.experiment import Options, Progress
from holdfast.lab.partial import partial_recovery, priority_checkpoint
from holdfast.lab.partial.model_check import check
from holdfast.lab.partial.own_model import comparison_result
from holdfast.lab.registry import EXPERIMENTS
from holdfast.lab.result import Result, environment
from holdfast.lab.simulate import pools
from holdfast.workloads.criterion import LossAt
from holdfast.workloads.local_server import SimulatedServer
from holdfast.workloads.registry import load_for_lab, load_workload
from holdfast.workloads.reinit import has_rule
from holdfast.workloads.simple_model import OneStateAdapter
from holdfast.workloads.workload import Arrays, Clock, Stack
from repository import ROOT
from stacks_workload import Stacks

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/workloads.md").read_text(), flags=re.S)
EXAMPLE = BLOCKS[0]
(FOR_SERVER,) = (block for block in BLOCKS if "my_server_model.py" in block)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """Write the example of the documentation to a file."""
    assert 30 <= len(EXAMPLE.splitlines()) <= 50
    path = tmp_path / "my_model.py"
    path.write_text(EXAMPLE)
    return path


def measured(model: Any, out: Path, *, trials: int, interval: int, lost: Fraction = Fraction(1, 2)) -> Result:
    """Return the result that `hf.lab.compare` reports."""
    options = Options(out=out, interval=interval, workload=OneStateAdapter(model))
    return comparison_result(options, silent, trials, lost)


def silent(label: str, total: int) -> Progress:
    return lambda done: None


@pytest.mark.parametrize("experiment", [partial_recovery, priority_checkpoint])
def test_the_documented_model_runs_through_an_experiment_without_claims(
    experiment: Any, example: Path, tmp_path: Path
) -> None:
    options = Options(trials=6, out=tmp_path / "out", workload=load_for_lab(str(example)))
    result = experiment.run(options, silent)
    assert (result.claims, {row["panel"] for row in result.rows}) == ([], {"logistic"})
    assert set(result.figures) == set(result.captions) == {result.experiment, "bound"}
    bounds, costs = result.tables[-2:]
    assert ("Theorem 3.2" in bounds.title, len(bounds.rows)) == (True, 1)
    assert len(costs.rows) == len(result.rows)
    trials = list(csv.DictReader((tmp_path / "out" / "trials.csv").read_text().splitlines()))
    assert {int(trial["lost_blocks"]) for trial in trials if trial["lost"] == "1/2"} == {16}  # of 31
    assert all(float(trial["whole"]) == round(float(trial["whole"])) for trial in trials)


@pytest.mark.parametrize("name", ["partial-recovery", "priority-checkpoint", "early-failures"])
def test_the_report_on_an_own_model_says_nothing_about_claims_and_panels(
    name: str, example: Path, tmp_path: Path
) -> None:
    options = Options(trials=4, out=tmp_path / "out", workload=load_for_lab(str(example)))
    result = EXPERIMENTS[name].run(options, silent)
    page = result_page.page(result, [], environment())

    assert "panel" not in page.terms
    words = [page.lead, *page.terms.values(), *page.remarks, *(table.title for table in page.tables)]
    words += [column.name for table in page.tables if not table.folded for column in table.columns]
    assert [text for text in words if re.search("claims? |panel|interval unknown", text)] == []
    assert "without claims" in page.lead


def test_the_documented_server_model_trains_as_the_documented_model_does(example: Path, tmp_path: Path) -> None:
    path = tmp_path / "my_server_model.py"
    path.write_text(FOR_SERVER)
    divided, alone = load_workload(str(path)), load_for_lab(str(example))
    server = SimulatedServer(divided, workers=3, owners=np.append(np.arange(30) % 2, 2))  # the intercept alone
    state = divided.start()
    for iteration in range(60):
        state = server.advance(state, iteration)

    assert server.loss(state) < divided.criterion
    assert divided.criterion == pytest.approx(alone.criterion, rel=1e-9)
    assert server.loss(state) == pytest.approx(alone.criterion, rel=1e-9)
    assert check(path).problems == []


def test_one_and_two_processes_give_the_same_rows(example: Path, tmp_path: Path) -> None:
    rows = [
        partial_recovery.run(
            Options(trials=6, jobs=jobs, out=tmp_path / str(jobs), workload=load_for_lab(str(example))), silent
        ).rows
        for jobs in (1, 2)
    ]
    assert rows[0] == rows[1]


def test_compare_returns_typed_rows_prints_a_table_and_writes_a_report(example: Path, tmp_path: Path) -> None:
    comparison = hf.lab.compare(example, trials=8, out=tmp_path / "out")
    full, partial, priority, _, _ = comparison
    assert (full.recovery, full.policy, full.reduction) == ("full", "full", 0)
    assert partial.cost_mean < full.cost_mean
    assert (priority.policy, priority.fraction, priority.unconverged) == ("priority", "1/8", 0)
    assert str(comparison).splitlines()[0].split() == [
        "recovery",
        "policy",
        "saved",
        "lost",
        "cost",
        "95",
        "%",
        "reduction",
    ]
    assert comparison.report.read_text().startswith("<!doctype html>")
    assert (tmp_path / "out" / "figures" / "comparison.pdf").exists()


class Halving:
    """The simplest model: every number is halved."""

    criterion: float | LossAt = 0.01

    def start(self, rng: np.random.Generator) -> Arrays:
        return {"x": np.arange(1.0, 9.0)}

    def step(self, state: Arrays, rng: np.random.Generator) -> Arrays:
        state["x"] /= 2  # the state belongs to the model
        return state

    def loss(self, state: Arrays) -> float:
        return float(np.abs(state["x"]).max())


def test_a_model_that_changes_its_state_in_place_has_the_same_costs_as_one_that_copies(tmp_path: Path) -> None:
    """With one lane, a state used to be a view of the recorded run, and costs came out negative."""

    class Copying(Halving):
        name = "halving"

        def step(self, state: Arrays, rng: np.random.Generator) -> Arrays:
            return {"x": state["x"] / 2}

    rows = [measured(model(), tmp_path / model.__name__, trials=5, interval=2).rows for model in (Halving, Copying)]
    assert rows[0] == rows[1]
    assert all(row["cost_mean"] >= 0 for row in rows[0])


def test_a_loss_at_criterion_is_met_at_exactly_that_iteration() -> None:
    class Until(Halving):
        criterion = LossAt(5)

    assert OneStateAdapter(Until()).criterion == pytest.approx(8 / 2**5)
    assert check(Until()).summary.endswith("5 iterations to the criterion 0.25; with a full checkpoint every 8 iterations most "
        "failures would come before the first one: use a smaller interval or a lower criterion")  # fmt: skip
    with pytest.raises(BadInput, match="LossAt must be at least 2"):
        LossAt(1)


def test_a_loss_that_oscillates_around_its_criterion_is_a_problem() -> None:
    """The costs of such a model ranged from -34 to 54 iterations, and nothing was found wrong with it."""

    class Swinging(Halving):
        criterion = 0.2

        def start(self, rng: np.random.Generator) -> Arrays:
            return {"x": np.arange(1.0, 9.0), "clock": np.zeros(1)}

        def step(self, state: Arrays, rng: np.random.Generator) -> Arrays:
            return {"x": 0.9 * state["x"], "clock": state["clock"] + 1}

        def loss(self, state: Arrays) -> float:
            return float(np.abs(state["x"]).max() * 0.1 + 0.25 + 0.15 * np.cos(state["clock"][0] / 3))

    (problem,) = check(Swinging()).problems
    assert "the loss is below the criterion 0.2 after" in problem
    assert "and so is the cost of a failure" in problem


def test_a_stochastic_model_is_detected_and_one_that_draws_only_later_is_refused() -> None:
    class Noisy(Halving):
        def step(self, state: Arrays, rng: np.random.Generator) -> Arrays:
            return {"x": state["x"] * rng.uniform(0.4, 0.6)}

    class NoisyLater(Halving):
        def step(self, state: Arrays, rng: np.random.Generator) -> Arrays:
            return {"x": state["x"] * (0.5 if state["x"][-1] > 1 else rng.uniform(0.4, 0.6))}

    assert (OneStateAdapter(Halving()).stochastic, OneStateAdapter(Noisy()).stochastic) == (False, True)
    assert check(NoisyLater()).problems == [
        "step of noisylater draws random numbers at iteration 3, but not at first: set `stochastic = True` in the model."
    ]


def test_random_numbers_from_elsewhere_are_a_problem_that_says_where_to_draw_them() -> None:
    class Elsewhere(Halving):
        def step(self, state: Arrays, rng: np.random.Generator) -> Arrays:
            return {"x": state["x"] * np.random.default_rng().uniform(0.4, 0.6)}

    (problem,) = check(Elsewhere()).problems
    assert "draw random numbers only from the rng that step gets" in problem


def test_a_step_may_change_its_state() -> None:
    assert check(Halving()).problems == []


def in_place(self: Stacks, stack: Stack, clock: Clock) -> Stack:
    stack["x"] /= 2
    return stack


def by_stream(self: Stacks, stack: Stack, clock: Clock) -> Stack:
    return {"x": stack["x"] / (2 + clock.stream)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"advance": in_place}, "advance changes array 'x' in place"),
        ({"advance": lambda self, stack, clock: {"x": stack["x"][:4]}}, r"advance turns array 'x' from float64\[8, 4\] into float64\[4, 4\]"),
        ({"advance": lambda self, stack, clock: {"y": stack["x"]}}, "advance returns arrays y, not x"),
        ({"advance": lambda self, stack, clock: {"x": stack["x"] * np.random.default_rng().random()}}, "the same iteration gave two values"),
        ({"advance": lambda self, stack, clock: {"x": stack["x"] / 2 + 0 * stack["x"] + stack["x"].mean() / 9}}, "lanes must be independent"),
        ({"loss": lambda self, stack: np.abs(stack["x"]).max() * np.ones(4)}, "the loss of a trial depends on the other trials"),
        ({"loss": lambda self, stack: np.abs(stack["x"]).max()}, r"loss returns shape \(\), not one number for each of 4 lanes"),
        ({"advance": by_stream}, "on another stream: set `stochastic = True`"),
        ({"criterion": 1e-320, "advance": lambda self, stack, clock: {"x": stack["x"] / 2 + 0.1}}, "the criterion .* is out of reach: after"),
        ({"criterion": 100.0}, "is below the criterion 100: nothing is left to train"),
        ({"start": lambda self, stream=0: [1.0]}, "start returns a list, not a dict"),
        ({"start": lambda self, stream=0: {"x": np.arange(1.0, 9.0), "y": np.zeros(2)}}, "array 'y' belongs to no block"),
        ({"norm": staticmethod(lambda blocks, a, b: np.zeros(3))}, "norm returns shape"),
        ({"steady": True, "loss": lambda self, stack: np.abs(stack["x"]).max(axis=0) * (1 + 2 * (np.abs(stack["x"]).max(axis=0) == 2))}, "`steady` must be False"),
    ],
)  # fmt: skip
def test_a_problem_of_a_workload_is_found_before_trials_run(wrong: dict[str, Any], message: str) -> None:
    assert check(Stacks()).problems == []
    (problem,) = check(type("Wrong", (Stacks,), wrong)(), limit=1500).problems
    assert re.search(message, problem)


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("x = 1", 2, "has no function workload(data)"),
        ("def workload(data): return 3", 2, "a int, lacks name, criterion, stochastic, steady, lanes, blocks, norm, start"),
        ("class M:\n    def step(self, state, rng): ...\ndef workload(data): return M()", 2, "lacks start, loss, criterion"),
        (EXAMPLE.replace("* self.x.T @ error", "* self.x @ error"), 2, "failed in step, line 2"),
        (EXAMPLE.replace('"intercept": state["intercept"] - 0.5', '"bias": state["intercept"] - 0.5'), 1, "it must keep names, shapes and types"),
        (EXAMPLE, 0, "no problem found in"),
        ("def urgency(info, step): return info.distances", 0, "no problem found in"),
        ("def urgency(info, step): return info.distances / info.distances.sum()", 1, "if other blocks are absent"),
        ("def urgency(info): return info.distances", 1, "urgency of"),
    ],
)  # fmt: skip
def test_lab_check_prints_the_problem_of_a_file_in_one_line(tmp_path: Path, text: str, code: int, message: str) -> None:
    (tmp_path / "m.py").write_text(text)
    ended = CliRunner().invoke(app, ["lab", "check", str(tmp_path / "m.py")])
    output = str(ended.exception) if isinstance(ended.exception, BadInput) else ended.stdout
    assert (2 if isinstance(ended.exception, BadInput) else ended.exit_code) == code
    assert message in " ".join(output.split())


def test_the_documented_commands_for_an_own_model_work(tmp_path: Path) -> None:
    page = (ROOT / "docs/lab.md").read_text()
    example = str(ROOT / "examples/pagerank.py")
    commands = re.findall(r"^holdfast (lab [^#\n]*examples/pagerank.py[^#\n]*)", page, flags=re.M)
    outputs = []
    for command in commands:
        words = command.replace("examples/pagerank.py", example).split()
        words += ["--jobs", "1", "--out", str(tmp_path / "out")] if "run" in words else []
        ended = CliRunner().invoke(app, words)
        assert ended.exit_code == 0, ended.output
        outputs.append(" ".join(ended.output.split()))
    assert "pagerank: 500 blocks" in outputs[0]
    assert "cost, 95 %" in outputs[1]
    assert "Theorem 3.2" in outputs[1]
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["command"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["qp-bound", "--workload", "m.py"], "has its own workloads"),
        (["partial-recovery", "--workload", "m.py", "--panel", "mlr-mnist"], "leave out one of them"),
        (["partial-recovery", "--workload", "m.py"], "There is no Python file"),
        (["partial-recovery", "--on", "slurm"], "cannot run on 'slurm'"),
        (["partial-recovery", "--address", "h:1"], "add --on ray"),
    ],
)
def test_options_that_contradict_each_other_are_refused(tmp_path: Path, words: list[str], message: str) -> None:
    ended = CliRunner().invoke(app, ["lab", "run", *words, "--out", str(tmp_path)])
    assert isinstance(ended.exception, BadInput)
    assert message in str(ended.exception)


def test_a_rule_for_blocks_never_saved_is_found_in_a_loaded_file(example: Path) -> None:
    assert not has_rule(load_for_lab(str(example)))
    ruled = "    def survivors(self, ids, held): return {}\n    def fresh(self, ids, summary, iteration, stream): return {}\n\n"
    example.write_text(EXAMPLE.replace("    def start(", ruled + "    def start(", 1))
    assert has_rule(load_for_lab(str(example)))


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install 'holdfast\[ray\]'"), pools.trial_cluster("ray", None):
        pass


def test_a_trial_that_does_not_converge_is_counted_and_left_out_of_the_mean(tmp_path: Path) -> None:
    class Trap(Halving):
        """A model that gets stuck if a restored number is large compared with the others."""

        criterion = 0.01

        def step(self, state: Arrays, rng: np.random.Generator) -> Arrays:
            x = state["x"]
            stuck = (x[0] > 3 * x[7]) | (x[1] > 3 * x[7])
            return {"x": np.where(stuck & (np.arange(8) < 2), x, x / 2)}

        def start(self, rng: np.random.Generator) -> Arrays:
            return {"x": np.full(8, 8.0)}

    result = measured(Trap(), tmp_path / "out", trials=12, interval=4)
    stuck = [row for row in result.rows if row["unconverged"]]
    assert stuck
    assert all(0 < row["unconverged"] < 12 and math.isfinite(row["cost_mean"]) for row in stuck)
    assert any("did not converge within 10 times" in remark for remark in result.remarks)


@pytest.mark.parametrize("lost", [0, -0.5, 1.5])
def test_a_lost_fraction_outside_0_to_1_is_refused(lost: float, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"must be a fraction of the blocks in \(0, 1\]"):
        hf.lab.compare(Halving(), lost=lost, out=tmp_path)


def test_rows_have_the_lost_fraction_that_was_asked_for(tmp_path: Path) -> None:
    rows = measured(Halving(), tmp_path, trials=2, interval=2, lost=Fraction(1, 4)).rows
    assert {row["lost"] for row in rows} == {"1/4"}


def test_hf_lab_can_be_used_without_the_packages_of_the_extra() -> None:
    import subprocess
    import sys

    code = "import sys, holdfast as hf; hf.lab.LossAt(3); sys.exit(any(m in sys.modules for m in ('matplotlib', 'jinja2', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
