"""A run that is fed by a loader with a state_dict: every rank's loader goes on where it was, or the run says why not."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from attached_runs import attach
from finished_run import different, events, failed_checks, last
from holdfast.audit.verdicts import audit_run
from holdfast.errors import BadInput, Corrupt
from holdfast.train.data.stream import LoaderBatches
from holdfast.train.state.restore import RestoredState
from streaming_script import STEPS, Crash, Numbered, divided, endless, of_rank, shuffled, train
from supervisor_process import SUPPORT, Start

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it, and torch warns
    pytest.mark.usefixtures("one_thread"),
]


def in_parts(out: Path, loader: Callable[[], Any], crash: int, **how: Any) -> dict[int, Any]:
    """What a run sees that crashes before this step, and is started again."""
    run = attach(out, save_every=2)
    with pytest.raises(Crash):
        train(run, loader(), crash=crash, **how)
    run.close()
    run = attach(out, save_every=2)
    seen = train(run, loader(), **how)
    run.close()
    return seen


@pytest.mark.parametrize(
    ("loader", "micro_batches", "crashes"),
    [(shuffled, 1, range(STEPS)), (divided, 1, (3, 4, 6)), (endless, 2, (3,)), (shuffled, 2, (1, 2))],
    ids=["shuffled", "divided", "endless and accumulated", "accumulated over the end of an epoch"],
)
def test_a_crash_at_any_boundary_changes_no_bit_and_no_batch(
    tmp_path: Path, loader: Callable[[], Any], micro_batches: int, crashes: Sequence[int]
) -> None:
    run = attach(tmp_path / "whole", save_every=2)
    whole = train(run, loader(), micro_batches=micro_batches)
    run.close()
    assert len(whole) == STEPS
    assert failed_checks(tmp_path / "whole") == []
    for crash in crashes:
        out = tmp_path / str(crash)
        seen = in_parts(out, loader, crash, micro_batches=micro_batches)
        assert seen == {step: data for step, data in whole.items() if step >= crash // 2 * 2}
        assert different(tmp_path / "whole", out) == []
        assert failed_checks(out) == []


def test_batches_that_processes_of_the_loader_have_loaded_ahead_are_not_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = attach(tmp_path / "whole", save_every=2)
    whole = train(run, shuffled(workers=1))
    run.close()
    assert "if they augment samples at random, a resumed run is not exact" in caplog.text
    seen = in_parts(tmp_path / "parts", lambda: shuffled(workers=1), crash=5)  # in the second epoch
    assert seen == {step: data for step, data in whole.items() if step >= 4}
    assert different(tmp_path / "whole", tmp_path / "parts") == []


def test_every_epoch_is_another_shuffle_where_the_sampler_goes_by_its_number(tmp_path: Path) -> None:
    seen = train(attach(tmp_path), divided(), steps=6)
    epochs = [sorted(int(x[0]) for (data,) in list(seen.values())[at : at + 3] for x in data) for at in (0, 3)]
    assert epochs == [list(range(10))] * 2
    first, second = ([int(x[0]) for x in seen[step][0]] for step in (0, 3))
    assert first != second


def test_the_audit_says_that_the_samples_are_the_loaders_own(tmp_path: Path) -> None:
    train(attach(tmp_path), shuffled())
    (said,) = [each.because for each in audit_run(tmp_path) if each.check == "every_sample_trained_once"]
    assert said == "8 steps of 1 batch, as many as planned; the loader chooses its samples: not checked"


def test_two_ranks_of_which_one_is_killed_each_get_their_own_position_back(start: Start) -> None:
    failures = [{"step": 7, "kind": "kill", "targets": [1]}]
    job = start(script=SUPPORT / "streaming_script.py", workers=2, save_every=4, failures=failures)
    assert job.result().get("verdict") == "completed", job.stderr
    assert [each.what.restored for each in events(job.out, "recover", "rank-1")] == [None, 4]
    assert failed_checks(job.out) == []  # steps that were trained twice, too, have the same fingerprints
    for rank, position in enumerate(last(job.out).extra["positions"]):
        feed = LoaderBatches(of_rank(rank))
        for _ in range(STEPS):
            next(feed)
        assert tuple(position) == feed.position()


class LoaderWithState:
    """A loader whose state_dict returns the given state."""

    def __init__(self, state: Any, batches: int = 99) -> None:
        self._state, self._batches = state, batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        left, self._batches = self._batches, 0
        return iter([torch.ones(2, 3)] * left)

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        self._state = state


def test_a_state_that_would_have_to_be_pickled_is_refused_by_its_key_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^loader/shards/1 is a object, which cannot be saved") as refused:
        train(attach(tmp_path), LoaderWithState({"shards": [1, object()]}))
    assert "\n" not in str(refused.value)
    assert events(tmp_path, "step") == []


def test_a_state_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="the state_dict of the loader takes"):
        train(attach(tmp_path), LoaderWithState({"buffer": "x" * (1 << 20)}))


def test_a_loader_that_ends_and_does_not_begin_again_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="the loader ended in its epoch 0 and has no batches when it is iterated"):
        train(attach(tmp_path), LoaderWithState({}, batches=3))


def test_a_loader_without_a_state_is_refused() -> None:
    with pytest.raises(BadInput, match="a DataLoader lacks state_dict and load_state_dict"):
        train(attach(), DataLoader([1, 2]))  # type: ignore[arg-type]


def test_a_generator_that_the_loader_shares_with_its_sampler_is_refused() -> None:
    """Resumed in the middle of an epoch, torchdata would shuffle the next one otherwise."""
    loader = StatefulDataLoader(Numbered(), shuffle=True, generator=torch.Generator())
    with pytest.raises(BadInput, match="give it to the sampler alone"):
        train(attach(), loader)


@pytest.mark.parametrize("sampler", [RandomSampler(Numbered()), WeightedRandomSampler([1.0] * 10, 10)])
def test_a_sampler_that_draws_and_does_not_say_where_it_is_is_refused(sampler: Any) -> None:
    with pytest.raises(
        BadInput, match=f"{type(sampler).__name__} does not save its position.*torchdata's RandomSampler"
    ):
        train(attach(), StatefulDataLoader(Numbered(), sampler=sampler))


def test_a_loader_is_not_protected_beside(tmp_path: Path) -> None:
    run, loader = attach(tmp_path), shuffled()
    run.protect(model=nn.Linear(1, 1), loader=loader)
    with pytest.raises(BadInput, match=r"leave the loader out of protect\(\)"):
        run.stream(loader, steps=2)


def test_a_run_of_another_kind_or_of_other_ranks_is_not_gone_on_with() -> None:
    with pytest.raises(BadInput, match="the snapshot of step 4 holds no position of a loader"):
        LoaderBatches(shuffled()).resume(RestoredState(step=4, world=1), 0, 1)
    two = RestoredState(step=4, world=2, positions=([0, ""], [0, ""]))
    with pytest.raises(
        BadInput, match=r"saved with the loaders of 2 ranks.*resume with 2 workers, or name another"
    ) as refused:
        LoaderBatches(shuffled()).resume(two, 0, 3)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "position", [None, 3, [0], [0, "no JSON"], [0, '[{"state": 1}, {"x": ["load", [1]]}, {}, []]']]
)
def test_a_strangers_position_is_refused(position: Any) -> None:
    with pytest.raises(Corrupt, match="lacks the position of rank 0"):
        LoaderBatches(shuffled()).resume(RestoredState(step=4, world=1, positions=(position,)), 0, 1)


def test_a_run_that_recovers_live_is_refused(start: Start) -> None:
    job = start(script=SUPPORT / "streaming_script.py", workers=2, recovery="replay")
    assert job.result().get("verdict") != "completed"
    assert "run.stream needs --recovery restart" in job.stderr
