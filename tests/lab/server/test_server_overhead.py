"""Figure 9's numbers, from made-up runs whose answers are known."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from holdfast.code_digest import code_digest
from holdfast.errors import BadInput
from holdfast.lab import result_page
from holdfast.lab.experiment import Options, Progress
from holdfast.lab.registry import EXPERIMENTS
from holdfast.lab.result import Result
from holdfast.lab.server import server_overhead as overhead
from holdfast.lab.server.server_overhead import (
    OverheadResults,
    _lengths,
    checkpoint_share,
    claims,
    figure,
    iterations_sooner,
    remarks,
    rows,
    time_added,
)
from holdfast.lab.server.server_trials import (
    ARMS,
    FULL,
    INTERVAL,
    MEASURED,
    SCAR,
    SCAR_ALONE,
    SIDE_BY_SIDE,
    ExperimentArm,
    ServerTrial,
    run_trials,
)


def losses(behind: float, length: int = 17) -> np.ndarray:
    """A loss that falls by 1 an iteration, and from the 7th on is where it was some iterations before."""
    fallen = np.arange(1.0, length + 1)
    return 100 - np.where(fallen >= 7, fallen - behind, fallen)


def trial(
    arm: ExperimentArm, behind: float = 0.0, *, seed: int = 0, checkpoint: float = 0.1, rest: float = 1.0
) -> ServerTrial:
    of = {name: np.zeros(17) for name in MEASURED}
    steps = np.arange(1, 18)
    of["loss"] = losses(behind)
    of["checkpoint"] = np.where([arm.policy.due(int(step)) for step in steps], checkpoint, 0.0)
    of["seconds"] = rest + of["checkpoint"]
    of["seconds"][0] = of["checkpoint"][0] = 1000.0  # it compiles
    return ServerTrial(arm, seed, of)


def found(behind_scar: Sequence[float] = (0.5, 0.5, 0.7), *, checkpoint: float = 0.01) -> OverheadResults:
    trials = [
        trial(arm, {SCAR: behind_scar[seed], FULL: 3.0}.get(arm, 0.0), seed=seed, checkpoint=checkpoint)
        for seed in range(len(behind_scar))
        for arm in ARMS
    ]
    return OverheadResults("lda-made-up", 20, trials)


@pytest.mark.parametrize(("scar", "full"), [(0.0, 3.0), (0.5, 3.0), (0.25, 2.0), (3.0, 3.0)])
def test_iterations_saved_are_the_difference_of_how_far_runs_are_behind(scar: float, full: float) -> None:
    assert iterations_sooner(losses(scar), losses(full)) == pytest.approx(full - scar)


def test_only_losses_first_reached_after_the_failure_count() -> None:
    full = losses(3.0)
    full[7:10] = 99.5  # whatever it does on the way back
    assert iterations_sooner(losses(0.5), full) == pytest.approx(2.5)


def test_a_run_that_never_reaches_the_loss_is_not_sooner() -> None:
    assert iterations_sooner(np.full(17, 99.0), losses(3.0)) == -np.inf
    assert np.isnan(iterations_sooner(losses(0.0), np.full(17, 99.0)))


def test_waiting_for_checkpoints_is_counted_against_the_rest_without_the_iteration_that_compiles() -> None:
    assert checkpoint_share(trial(SCAR_ALONE, checkpoint=0.05, rest=2.0)) == pytest.approx(0.025)


def test_a_save_is_charged_for_its_own_iteration_and_for_the_next_in_which_it_is_written() -> None:
    each = trial(SIDE_BY_SIDE, checkpoint=0.1)
    assert time_added(each) == pytest.approx(0.1)
    each.columns["seconds"][4::4] += 0.2
    assert time_added(each) == pytest.approx(0.3)


def test_claims_hold_when_scar_is_two_iterations_sooner_and_saves_cost_little() -> None:
    assert "longer than the claims allow" not in "\n".join(remarks(found()))
    assert {claim.id: claim.holds for claim in claims(found())} == dict.fromkeys(
        ("lda-made-up-sooner", "lda-made-up-share", "lda-made-up-goal", "lda-made-up-added"), True
    )


def test_failed_claims_are_explained() -> None:
    poor = found((1.5,) * 5, checkpoint=0.2)
    assert not any(claim.holds for claim in claims(poor))
    text = "\n".join(remarks(poor))
    assert "it is itself 1.50 (1.50 to 1.50) iterations behind" in text
    assert "checkpoints take longer than the claims allow. On this machine, 7 processes share the cores" in text
    assert "training waits 0.2 s for a save of all blocks" in text


def test_two_panels_show_the_effect_of_the_length_of_an_iteration() -> None:
    (line,) = _lengths([found(checkpoint=0.2), replace(found(checkpoint=0.1), topics=200)])
    assert "with 20 topics, training waits 0.2 s for a checkpoint in an iteration of 1.2 s" in line
    assert "with 200 topics, training waits 0.1 s for a checkpoint in an iteration of 1.1 s" in line
    assert _lengths([found()]) == []


def test_the_report_has_the_remarks_and_the_figure(tmp_path: Path) -> None:
    result = Result(
        experiment="server-overhead",
        config={},
        rows=rows(found()),
        claims=claims(found()),
        remarks=remarks(found()),
        figures={"server-overhead": figure(found())},
    )
    result_page.write(result, tmp_path)
    assert "nodes are killed at the end of iteration 7" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "figures" / "server-overhead.png").stat().st_size > 1000


def test_an_unknown_panel_is_refused_with_the_known_names(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"there is no panel 'mlr-mnist'; choose among lda-20news, lda-20news-200"):
        overhead.run(Options(out=tmp_path, data=tmp_path, panels=("mlr-mnist",)), lambda what, total: lambda done: None)


def test_finished_trials_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(out=tmp_path / "out")
    log = options.open_log("server-lda-generated", code_digest())
    for number in range(2):
        for name in MEASURED:
            log.record(f"scar/5/12/{name}/{number}", number + 0.5)
    log.record("scar/5/12/length", 2)
    log.close()
    monkeypatch.setattr("holdfast.lab.server.server_trials.serve", lambda *_, **__: pytest.fail("it ran"))

    def silent(what: str, total: int) -> Progress:
        return lambda done: None

    (again,) = run_trials("lda-generated", 12, [SCAR], [5], options, silent)
    assert again.losses.tolist() == [0.5, 1.5]


def test_all_arms_but_one_write_the_same_number_of_bytes() -> None:
    assert {arm.policy.interval for arm in ARMS if arm != SIDE_BY_SIDE} == {INTERVAL}


def test_the_experiments_can_be_listed_without_ray() -> None:
    assert EXPERIMENTS["server-overhead"] is overhead.EXPERIMENT
    import subprocess

    code = "import sys, holdfast.lab.registry; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_a_loss_that_the_other_run_never_reaches_is_reported_as_unknown() -> None:
    text = "\n".join(remarks(found(behind_scar=(-3.0, 0.5, 0.7))))
    assert "`scar` unknown" in text
    assert "inf" not in text
