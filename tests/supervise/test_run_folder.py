"""The folder of a run accepts only commands of the same run, unless nothing was trained in it."""

from pathlib import Path

import pytest

from holdfast.checkpoint import manifest, snapshot
from holdfast.checkpoint.store import DirectoryStore
from holdfast.errors import BadInput
from holdfast.events import Attempt, Launch, Recover, Seconds, Step
from holdfast.history.log import HistoryWriter
from holdfast.runs import lock
from holdfast.runs.config import RunConfig, read_config
from holdfast.sampler.digest import Samples
from holdfast.supervise.run_folder import claimed


def config(args: str, **how: object) -> RunConfig:
    return RunConfig(script="train.py", args=tuple(args.split()), **how)  # type: ignore[arg-type]


def claim(out: Path, mine: RunConfig, *may_change: str, continues: int | None = None) -> None:
    """Run a command of `mine` in `out`. The workers continue the run in attempt `continues`, unless they refuse."""
    out.mkdir(exist_ok=True)
    with claimed(out, mine, may_change=may_change):
        if continues:
            with HistoryWriter(out / "history", "rank-0") as history:
                history.append(Attempt(continues, 1, 0, 7))
                history.append(Recover(continues, 0, 0, 0, "restored", 0.1))


def train(out: Path, steps: int) -> None:
    with HistoryWriter(out / "history", "rank-0") as history:
        history.append(Attempt(1, 1, 0, 7))
        for step in range(steps):
            history.append(Step(1, 1, 0, 0, step, step, Samples.of([step]), Seconds(0.0, 0.0, 0.0)))
    snapshot.save(DirectoryStore(out / "checkpoints"), 0, {}, {})


def refused(out: Path, mine: RunConfig, *may_change: str) -> str:
    with pytest.raises(BadInput) as error:
        claim(out, mine, *may_change)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_changed_arguments_are_named_and_refused_unless_they_may_change(tmp_path: Path) -> None:
    out = tmp_path / "out"
    claim(out, config("--lr 0.1 --log-interval 10"))
    train(out, 1)
    why = refused(out, config("--lr 0.2 --log-interval 20"))
    assert "--lr was 0.1, not 0.2; --log-interval was 10, not 20" in why
    assert "--may-change lr,log-interval" in why
    assert "--log-interval" not in refused(out, config("--lr 0.2 --log-interval 20"), "log-interval")
    assert read_config(out).args[1] == "0.1"
    claim(out, config("--lr 0.2 --log-interval 20"), "lr", "--log_interval", continues=2)
    assert read_config(out).args == ("--lr", "0.2", "--log-interval", "20")
    assert "seed was not given, not 1" in refused(out, config("--lr 0.2 --log-interval 20", seed=1), "seed")


def test_a_shorter_run_is_refused_without_advice_that_is_refused_next(tmp_path: Path) -> None:
    out = tmp_path / "out"
    claim(out, config("--num_train_epochs 12 --warmup-steps 9"))
    train(out, 1)
    why = refused(out, config("--num_train_epochs 3 --warmup-steps 9"))
    assert "--num_train_epochs was 12, not 3" in why
    assert why.endswith("A run can be made longer but not shorter.")
    assert "--may-change" not in why
    assert "--may-change warmup-steps" in refused(out, config("--num_train_epochs 12 --warmup-steps 5"))


def test_a_command_that_the_workers_refuse_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out"
    claim(out, config("--epochs 12"))
    train(out, 1)
    claim(out, config("--epochs 6"), "epochs")  # fewer steps than planned: no worker continues with that
    assert read_config(out).args == ("--epochs", "12")
    with pytest.raises(KeyError), claimed(out, config("--epochs x"), may_change=["epochs"]):
        raise KeyError
    claim(out, config("--epochs 12"), continues=2)
    claim(out, config("--epochs 24"), "epochs", continues=3)
    assert read_config(out).args == ("--epochs", "24")


def test_a_run_that_is_extended_may_have_larger_numbers_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    claim(out, config("--epochs 3 --lr 0.1"))
    train(out, 1)
    assert "or --extend to train it for longer" in refused(out, config("--epochs 5 --lr 0.1"))
    assert "--epochs was 3, not 2" in refused(out, config("--epochs 2 --lr 0.1", extend=True))
    why = refused(out, config("--epochs 5 --lr 0.2", extend=True))
    assert "--lr was 0.1, not 0.2" in why
    assert "--epochs" not in why
    claim(out, config("--epochs 5 --lr 0.1", extend=True))


def test_a_folder_in_which_nothing_was_trained_may_be_taken_by_another_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    claim(out, config("--lr wrong"))
    train(out, 0)
    claim(out, config("--lr 0.1", seed=3))
    assert read_config(out).seed == 3
    assert manifest.steps(DirectoryStore(out / "checkpoints")) == []
    assert not (out / "history").exists()
    assert (out / "history-before-1" / "rank-0.jsonl").exists()  # what went wrong then can still be read
    train(out, 1)
    assert "holds another run" in refused(out, config("--lr 0.2", seed=3))


def test_a_refused_first_start_of_several_nodes_does_not_block_the_corrected_command(tmp_path: Path) -> None:
    """The nodes gave different arguments, so the start was refused before any step."""
    out, place = tmp_path / "out", str(tmp_path / "place")
    with (
        claimed(out, config("--out a0.pt", checkpoints=place), 1, has_saved=False),
        HistoryWriter(out / "history", "supervisor-1") as history,
    ):
        history.append(Launch(1, 1))
    corrected = config("--out a.pt", checkpoints=place)
    with pytest.raises(BadInput, match=r"the script's argument --out was a0.pt, not a.pt"), claimed(out, corrected, 1):
        pass  # the shared place holds something of the run
    with lock.hold(out, 0), pytest.raises(BadInput), claimed(out, corrected, 1, has_saved=False):
        pass  # another node uses the folder
    with claimed(out, corrected, 1, has_saved=False):
        assert read_config(out).args == ("--out", "a.pt")
    train(out, 1)
    with pytest.raises(BadInput), claimed(out, config("--out b.pt", checkpoints=place), 1, has_saved=False):
        pass


def test_an_argument_without_a_name_is_named_by_its_position(tmp_path: Path) -> None:
    out = tmp_path / "out"
    claim(out, config("small"))
    train(out, 1)
    assert "(the script's argument 1 was small, not large)" in refused(out, config("large"))
