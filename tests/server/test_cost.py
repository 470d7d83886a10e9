"""The cost of a run on the parameter server: parts of iterations, failures, and predicted next to measured costs."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fake_server_histories import PLAN, contracting, done, perturbed, told
from holdfast.cli import app
from holdfast.errors import BadInput
from holdfast.events import Chosen, Commit, Event, Lost, Open, Restored, Serve, What
from holdfast.history.log import HistoryWriter
from holdfast.sampler.digest import Samples
from holdfast.server.cost import convergence_rate, is_served, measured_cost, served_cost
from holdfast.server.settings import Settings
from holdfast.server.status import ServerOutcome, Status, summary


def test_the_parts_of_iterations_add_up() -> None:
    run = served_cost(told(Open(2), PLAN, done(0, 3.0), done(1, 2.0)))

    assert run.seconds == {
        "pull": 0.25,
        "compute": 1.0,
        "push": 0.25,
        "apply": 0.125,
        "checkpoint": 0.125,
        "other": 0.25,
    }
    assert run.checkpoint_share == pytest.approx(0.0625)
    assert (run.iterations, run.losses, run.wall) == (2, [3.0, 2.0], 3.0)


def test_saves_are_counted_once_however_often_they_are_found() -> None:
    chosen = Chosen(1, Samples.of([1, 2]), 64, 0.1)
    run = served_cost(told(Open(2), PLAN, chosen, Commit(0, 1, 64), PLAN, Commit(1, 1, 0, found=True, blocks=(1, 2))))

    assert (run.saves, run.bytes) == (1, 64)


def test_the_initial_state_is_not_counted_as_a_save(tmp_path: Path) -> None:
    whats = [Open(2), PLAN, Commit(0, 0, 0), done(0, 3.0), done(1, 2.0), Commit(0, 2, 64)]

    assert served_cost(told(*whats)).saves == 1
    assert summary(_written(tmp_path, whats))[2] == "1 save, the last after iteration 2"


def test_a_failure_lasts_from_the_strike_to_the_next_iteration_that_is_done() -> None:
    (failure,) = served_cost(told(*perturbed())).failures

    assert (failure.iteration, failure.members) == (12, ["node-0"])
    assert (failure.blocks, failure.restored, failure.seconds) == (2, 2, 3.0)
    assert failure.size is not None


def test_a_loss_repeated_by_the_next_controller_is_not_another_failure() -> None:
    lost = Lost(0, 0, "node", 0, "its process died", (0, 1), 0)
    again = lost._replace(iteration=1, blocks=(), version=0)
    controller = Lost(1, 0, "controller", 0, "its process died")
    run = served_cost(told(Open(2), PLAN, lost, done(0, 3.0), PLAN, controller, again, done(1, 2.0)))

    assert [failure.members for failure in run.failures] == [["node-0"], ["controller"]]
    assert [failure.blocks for failure in run.failures] == [2, 0]


def test_the_rate_is_read_off_the_losses() -> None:
    assert convergence_rate(served_cost(told(*contracting(0.8)))) == pytest.approx(0.8)


@pytest.mark.parametrize("losses", [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [3.0, 2.0], [None] * 9])
def test_losses_that_do_not_fall_give_no_rate(losses: Sequence[float | None]) -> None:
    run = served_cost(told(Open(2), PLAN, *(done(k, loss) for k, loss in enumerate(losses))))

    assert convergence_rate(run) is None


def test_a_run_that_goes_back_by_five_iterations_needs_five_to_regain_its_loss() -> None:
    before = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0]
    (failure,) = served_cost(_failing(before, [7.0, 6.0, 5.0, 4.0, 3.0, 2.0])).failures

    assert failure.regained == 5


def test_a_loss_that_falls_on_is_regained_at_once_and_a_later_one_may_never_be() -> None:
    assert [failure.regained for failure in served_cost(_failing([9.0, 8.0], [7.5, 7.0])).failures] == [1]
    assert [failure.regained for failure in served_cost(_failing([9.0, 8.0], [8.5, None])).failures] == [None]


def test_without_restored_blocks_or_an_earlier_loss_nothing_is_regained() -> None:
    worker = told(Open(2), PLAN, done(0, 3.0), Lost(1, 0, "worker", 0, "its process died", (), 1), done(1, 2.0))

    for history in (worker, _failing([], [8.0, 7.0]), _failing([None], [8.0])):
        assert [failure.regained for failure in served_cost(history).failures] == [None]


def _failing(before: Sequence[float | None], after: Sequence[float | None]) -> list[Event]:
    """A run with these losses that loses node 0 between the two."""
    at = len(before)
    lost = Lost(at, 0, "node", 0, "its process died", (0, 1), at)
    restored = Restored(at, 0, 1, 1, (0, 1), (0, 0), 0.25, 0.5)
    later = (done(k, loss) for k, loss in enumerate(after, at))
    return told(Open(2), PLAN, *(done(k, loss) for k, loss in enumerate(before)), lost, restored, *later)


def test_the_cost_is_measured_beside_a_run_without_failures() -> None:
    measured = measured_cost(served_cost(told(*perturbed())), served_cost(told(*contracting())))

    assert measured is not None
    assert 0.5 < measured < 2  # half of the blocks went back by 2 iterations


def test_a_reference_of_another_workload_is_refused() -> None:
    other = [what._replace(workload="other") if isinstance(what, Serve) else what for what in contracting()]

    with pytest.raises(BadInput, match="--reference is a run of other, not of quadratic"):
        measured_cost(served_cost(told(*perturbed())), served_cost(told(*other)))


def test_only_a_history_with_a_plan_of_a_server_is_served() -> None:
    assert is_served(told(PLAN))
    assert not is_served(told(Open(2)))
    with pytest.raises(BadInput, match="not the history of a parameter server run"):
        served_cost(told(Open(2)))


def _written(folder: Path, whats: Sequence[What]) -> Path:
    with HistoryWriter(folder / "history", "controller", clock=iter(range(999)).__next__) as history:
        for what in whats[1:]:
            history.append(what)
    return folder


def test_the_command_shows_the_cost_of_a_run(tmp_path: Path) -> None:
    run, calm = _written(tmp_path / "run", perturbed()), _written(tmp_path / "calm", contracting())

    shown = CliRunner().invoke(app, ["cost", str(run), "--reference", str(calm)])

    assert shown.exit_code == 0, shown.output
    for part in (
        "20 iterations",
        "node-0",
        "loss regained",
        "2 iterations",
        "cost of the failures: 1.",
        "checkpoints took 6.2%",
    ):
        assert part in shown.output


def test_without_a_reference_no_cost_is_claimed(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["cost", str(_written(tmp_path / "run", perturbed()))])

    assert shown.exit_code == 0, shown.output
    assert "Theorem" not in shown.output  # the distance to the optimum is not recorded
    assert "give --reference" in shown.output


def test_the_command_gives_all_numbers_as_json(tmp_path: Path) -> None:
    run = _written(tmp_path / "run", perturbed())

    shown = json.loads(CliRunner().invoke(app, ["cost", str(run), "--json"]).stdout)[str(run)]

    assert shown["failures"][0]["members"] == ["node-0"]
    assert shown["failures"][0]["regained"] == 2
    assert shown["measured_cost"] is None


def test_training_shows_when_it_begins_and_which_nodes_and_blocks_it_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(settings: Settings, address: object, report: Callable[[Status], None]) -> ServerOutcome:
        report(Status())
        _written(settings.out, perturbed())
        report(Status(iteration=20, loss=5.0, failures=1))
        return ServerOutcome(converged=True, iterations=20, loss=5.0)

    monkeypatch.setattr("holdfast.server.driver.serve", trained)
    words = ["serve", "train", "--workload", "mlr-digits", "--out", str(tmp_path / "run")]
    shown = CliRunner().invoke(app, words)

    assert shown.exit_code == 0, shown.output
    assert [line for line in shown.stderr.splitlines() if line] == [
        "training on 2 nodes and 2 workers",
        "node 0 was lost in iteration 12: its process died",
        "2 blocks restored; iteration 12 is done",
    ]


def test_the_command_audits_a_served_run(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["audit", str(_written(tmp_path / "run", contracting()))])

    assert shown.exit_code == 1
    assert "there is no history of node-0" in " ".join(shown.output.split())
