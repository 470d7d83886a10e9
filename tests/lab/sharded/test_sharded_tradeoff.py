"""The experiment sharded-tradeoff, with a model so small that every trial takes a moment."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.code_digest import modules_digest
from holdfast.errors import BadInput
from holdfast.lab.experiment import Options, Progress
from holdfast.lab.sharded import sharded_tradeoff
from holdfast.lab.sharded.shard_failures import GptSize, TradeoffSize
from source_tree import imported, modules

TINY = TradeoffSize(
    model=GptSize(width=8, layers=1, heads=2, context=8, batch=4, rate=1e-2, warm_up=12),
    text=2_000_000,
    seeds=2,
    early=1,
    late=2,
    intervals=(4, 16),
    steps=48,
    settle=4,
    averaged=2,
    spacing=2,
    losses=3,
    rates=(0.01,),
    repeated_seeds=1,
    repeated_steps=32,
    repeated_interval=8,
)


def silent(what: str, total: int) -> Progress:
    return lambda done: None


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_tradeoff, "QUICK", TINY)


@pytest.mark.slow
@pytest.mark.usefixtures("_tiny")
def test_the_command_writes_every_trial_claim_and_figure_and_reuses_them_when_repeated(tmp_path: Path) -> None:
    words = ["lab", "run", "sharded-tradeoff", "--quick", "--jobs", "1", "--out", str(tmp_path)]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code in (0, 1), ended.output  # so small a model refutes some claims
    result = json.loads((tmp_path / "result.json").read_text())
    trials = [row for row in result["rows"] if row["kind"] == "trial"]
    # Failures, times: rollback, whole and fresh, others, shadow and noise.
    assert len(trials) == 6 * (2 + 2 * 3 * 2 + 4 * 3 + 2)
    assert len(result["claims"]) == 6 * 2 + 1
    assert {path.stem for path in (tmp_path / "figures").glob("*.png")} == {"cost", "repeated", "bound"}
    (replay,) = (claim for claim in result["claims"] if claim["id"] == "replay-exact")
    assert replay["holds"]
    CliRunner().invoke(app, words)
    repeated = json.loads((tmp_path / "result.json").read_text())
    assert repeated["rows"] == result["rows"]
    assert any("reused" in remark for remark in repeated["remarks"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_full_run_without_a_cuda_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no CUDA device: add --quick"):
        sharded_tradeoff.run(Options(out=tmp_path), silent)


def test_a_change_of_any_module_that_trains_makes_earlier_measurements_outdated() -> None:
    known = modules()
    reached, todo = set[str](), ["holdfast.lab.sharded.shard_trials"]
    while todo:
        if (name := todo.pop()) not in reached:
            reached.add(name)
            todo += [
                other
                for other in imported(known[name].read_text())
                if other.startswith(("holdfast.lab.sharded.", "holdfast.live."))
            ]
    assert reached <= set(sharded_tradeoff.MEASURED_BY)
    assert modules_digest(*sharded_tradeoff.MEASURED_BY) != modules_digest(*sharded_tradeoff.MEASURED_BY[1:])
