"""A run in one process: it resumes exactly, accumulates, loads ahead, records what it did, and refuses what cannot be."""

import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from attached_runs import TASK, attach, run_to_end
from finished_run import different, distance, events, failed_checks, last, losses
from holdfast.checkpoint import manifest, retention, snapshot
from holdfast.checkpoint.store import DirectoryStore
from holdfast.errors import BadInput, StorageFailed
from holdfast.faults.schedule import at
from holdfast.sampler.digest import Samples
from holdfast.train import inject
from holdfast.train.data.dataset import PROBES
from holdfast.train.iterators import Batch
from holdfast.train.run import Run
from training_script import SAMPLES, Crash, Points, Task, network, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("writer", ["overlapped", "blocking"])
@pytest.mark.parametrize(
    "task",
    [
        TASK,
        Task(epochs=3, scaler=True),
        pytest.param(Task(epochs=3, micro_batches=3, num_workers=1), marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_stopped_and_resumed_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, task: Task, writer: str
) -> None:
    whole = run_to_end(tmp_path / "whole", task, writer=writer)
    for stop in (3, 8, 8, 14):
        train(attach(tmp_path / "parts", save_every=5, writer=writer), task, steps=stop)
    parts = run_to_end(tmp_path / "parts", task, writer=writer)
    assert different(whole, parts) == []
    assert failed_checks(parts) == []
    recovered = [(e.what.restored, e.what.rng) for e in events(parts, "recover")]
    assert recovered == [(None, "keyed"), (0, "restored"), (5, "restored"), (5, "restored"), (10, "restored")]


def test_the_first_weights_survive_even_if_nothing_keyed_them(tmp_path: Path) -> None:
    task = Task(epochs=1, unseeded=True)
    train(attach(tmp_path / "a", save_every=50), task, steps=2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert different(run_to_end(tmp_path / "a", task), run_to_end(tmp_path / "b", task)) == []


def test_without_a_folder_the_same_weights_come_out_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = train(attach(), TASK).state_dict()
    assert list(tmp_path.iterdir()) == []
    saved = last(run_to_end(tmp_path / "out")).tensors
    assert all(torch.equal(saved[f"model/{name}"], value.cpu()) for name, value in plain.items())


def test_loading_ahead_in_processes_changes_nothing(tmp_path: Path) -> None:
    here = run_to_end(tmp_path / "here")
    ahead = run_to_end(tmp_path / "ahead", Task(epochs=3, num_workers=2))
    assert different(here, ahead) == []


def test_accumulated_gradients_are_those_of_the_whole_share_to_rounding(tmp_path: Path) -> None:
    task = {"epochs": 2, "dropout": 0.0}
    whole = run_to_end(tmp_path / "whole", Task(**task))
    parts = run_to_end(tmp_path / "parts", Task(**task, micro_batches=5))  # 16 samples in 3, 3, 3, 3 and 4
    assert 0 < distance(whole, parts) < 1e-5


def test_micro_batches_divide_the_share_and_only_the_last_ends_the_step() -> None:
    run = attach()
    run.protect(model=nn.Linear(1, 1))
    batches = list(run.batches(Points(augment=False), global_batch=7, num_epochs=1, micro_batches=3))
    assert [batch.is_last for batch in batches] == [False, False, True] * (SAMPLES // 7)
    assert [len(batch.ids) for batch in batches[:3]] == [2, 2, 3]
    assert [batch.weight for batch in batches[:3]] == [2 / 7, 2 / 7, 3 / 7]
    assert [batch.step for batch in batches] == sorted([*range(SAMPLES // 7)] * 3)
    ids = np.concatenate([batch.ids for batch in batches])
    assert len(set(ids.tolist())) == SAMPLES // 7 * 7


def test_a_batch_is_what_the_dataset_gives() -> None:
    pairs = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    batch = first_of(pairs)
    x, y = batch
    assert torch.equal(x, torch.from_numpy(batch.ids))
    assert torch.equal(y, 2 * x)
    words = [{"word": index, "length": index % 3} for index in range(10)]
    batch = first_of(words)
    assert batch.data["word"].tolist() == batch.ids.tolist()
    lengths = first_of(words, collate_fn=lambda several: max(each["length"] for each in several))
    assert lengths.data in (1, 2)


def first_of(dataset: Any, **how: Any) -> Batch:
    run = attach()
    run.protect(model=nn.Linear(1, 1))
    return next(iter(run.batches(dataset, global_batch=4, num_epochs=1, **how)))


def test_a_step_is_on_record_with_its_samples_its_loss_and_its_time(tmp_path: Path) -> None:
    out = run_to_end(tmp_path)
    steps = events(out, "step", "rank-0")
    assert [step.what.step for step in steps] == list(range(18))
    together = sum((step.what.samples for step in steps[:6]), Samples())
    assert together == Samples.of(range(SAMPLES))  # 6 windows of 16 are an epoch
    assert all(isinstance(loss, float) for loss in losses(out).values())
    assert all(step.what.seconds.compute > 0 and not step.what.seconds.device for step in steps)
    assert len({step.what.state for step in steps}) == 18  # every step changes the state
    saves = {save.what.step: save.what.seconds for save in events(out, "save")}
    assert list(saves) == [0, 5, 10, 15, 18] == [commit.what.step for commit in events(out, "commit")]
    assert [done.what.step for done in events(out, "done")] == [18]
    (plan,) = events(out, "plan")
    assert {
        "samples": SAMPLES,
        "batch": 16,
        "epochs": 3,
        "seed": 0,
        "save_every": 5,
    }.items() <= plan.what._asdict().items()


def test_a_commit_that_was_made_and_not_recorded_is_found(tmp_path: Path) -> None:
    train(attach(tmp_path, save_every=5), TASK, steps=7)
    history = tmp_path / "history" / "rank-0.jsonl"
    lines = history.read_text().splitlines(keepends=True)
    history.write_text("".join(line for line in lines if '"commit"' not in line or '"step": 5' not in line))
    run_to_end(tmp_path)
    (found,) = [commit for commit in events(tmp_path, "commit") if commit.what.found]
    assert found.what.step == 5
    assert failed_checks(tmp_path) == []


def test_a_bad_snapshot_is_passed_over_and_said(tmp_path: Path) -> None:
    whole = run_to_end(tmp_path / "whole")
    out = tmp_path / "out"
    train(attach(out, save_every=5), TASK, steps=12)
    flip_a_bit(out / "checkpoints" / "step-00000010" / "shard-00000-of-00001.safetensors")
    run_to_end(out)
    recover = events(out, "recover")[-1]
    assert recover.what.restored == 5
    assert [passed["name"] for passed in recover.what.passed_over] == ["step-00000010/"]
    assert different(whole, out) == []
    assert failed_checks(out) == []


def test_without_any_good_snapshot_it_starts_again_and_says_what_was_bad(tmp_path: Path) -> None:
    train(attach(tmp_path, save_every=5), TASK, steps=12)
    for file in (tmp_path / "checkpoints").rglob("shard-00000-of-00001.safetensors"):
        flip_a_bit(file)
    run_to_end(tmp_path)
    recover = events(tmp_path, "recover")[-1]
    assert recover.what.restored is None
    assert len(recover.what.passed_over) == 2
    assert failed_checks(tmp_path) == []


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"config": {}, "conditions": {}, "generators": [{}]},
        {"state": 7, "config": {}, "conditions": {}, "generators": [{}]},
        {"state": {"dict": [["model", {"tensor": "none"}]]}, "config": {}, "conditions": {}, "generators": [{}]},
        {"state": {"dict": []}, "config": {}, "conditions": {}, "generators": []},
        {"state": {"dict": []}, "config": {}, "generators": [{}]},
        {"state": {"dict": []}, "config": 7, "conditions": {}, "generators": [{}]},
    ],
)
def test_a_snapshot_that_no_run_has_saved_is_passed_over_though_its_digests_fit(
    tmp_path: Path, extra: dict[str, Any]
) -> None:
    run = attach(tmp_path, save_every=5)
    train(run, TASK, steps=12)
    run.close()
    store = DirectoryStore(tmp_path / "checkpoints")
    newest = manifest.read_manifest(store, 10).position
    retention.set_aside(store, 10)
    snapshot.save(store, 10, {"w": torch.zeros(3)}, extra, **{k: v for k, v in newest.items() if k != "step"})
    again = attach(tmp_path, save_every=5)
    train(again, TASK, steps=12)
    again.close()
    recover = events(tmp_path, "recover")[-1].what
    assert recover.restored == 5
    assert [each["name"] for each in recover.passed_over] == ["step-00000010/"]


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_resume_loads_only_what_is_still_to_be_trained(tmp_path: Path) -> None:
    asked: list[int] = []

    class Counted(Points):
        def __getitem__(self, index: int) -> Any:
            asked.append(index)
            return super().__getitem__(index)

    def steps(until: int) -> list[int]:
        run, seen = attach(tmp_path, save_every=5), []
        run.protect(model=(model := nn.Linear(1, 1)))
        with suppress(Crash):
            for batch in run.batches(Counted(augment=False), global_batch=16, num_epochs=3):
                if batch.step == until:
                    raise Crash
                model.bias.data += 1
                seen.append(batch.step)
        return seen

    assert steps(12) == list(range(12))
    asked.clear()
    assert steps(18) == list(range(10, 18))
    assert len(asked) == PROBES + 8 * 16


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    run_to_end(tmp_path)
    before = last(tmp_path).manifest
    run_to_end(tmp_path)
    assert last(tmp_path).manifest == before
    assert len(events(tmp_path, "step")) == 18
    assert failed_checks(tmp_path) == []


@pytest.mark.parametrize("writer", ["overlapped", "blocking"])
def test_a_save_that_fails_for_good_stops_the_run_at_a_boundary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    def full(*_: Any) -> None:
        raise StorageFailed("no space")

    run = attach(tmp_path, save_every=5, writer=writer)
    monkeypatch.setattr(DirectoryStore, "put", full)
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between tries
    with pytest.raises(StorageFailed, match=r"step 0 .*no space"):
        train(run, TASK)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"global_batch": 0}, r"global_batch must be at least 1 \(got 0\)"),
        ({"global_batch": 97}, "96 samples do not fill one global batch of 97"),
        ({"num_epochs": 0}, "The number of epochs must be at least 1"),
        (
            {"micro_batches": 17},
            "micro_batches must be between 1 and 16, the samples of one rank and step \\(got 17\\)",
        ),
        ({"micro_batches": 0}, "between 1 and 16, .* \\(got 0\\)"),
        ({"num_workers": -1}, "num_workers must be 0 .* or more \\(got -1\\)"),
        ({"seed": -1}, "The seed -1 does not fit"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_in_one_line(how: dict[str, Any], message: str) -> None:
    run = attach()
    run.protect(model=nn.Linear(1, 1))
    with pytest.raises(BadInput, match=message) as refused:
        run.batches(Points(augment=False), **{"global_batch": 16, "num_epochs": 1, **how})
    assert "\n" not in str(refused.value)


def test_a_stream_is_no_dataset() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(9))

        def __len__(self) -> int:
            return 9

    run = attach()
    run.protect(model=nn.Linear(1, 1))
    with pytest.raises(BadInput, match="Stream is not a map-style dataset"):
        run.batches(Stream(), global_batch=1, num_epochs=1)


def test_a_failure_past_the_end_is_refused() -> None:
    inject.check(at([0, 17], kind="kill") + at([18], kind="enospc"), 18)
    with pytest.raises(BadInput, match="No failure can strike before step 18, 400: the last step of this run is 17"):
        inject.check(at([3, 400, 18], kind="kill"), 18)


def test_calls_out_of_order_are_refused() -> None:
    run = attach()
    with pytest.raises(BadInput, match=r"call protect\(\) before batches\(\)"):
        run.batches(Points(augment=False), global_batch=16, num_epochs=1)
    with pytest.raises(BadInput, match="protect\\(\\) was given nothing"):
        run.protect()
    run.protect(model=nn.Linear(1, 1))
    with pytest.raises(BadInput, match=r"protect\(\) was called before"):
        run.protect(model=nn.Linear(1, 1))
    with pytest.raises(BadInput, match=r"stop\(\) ends the loop of this run, and it has not begun"):
        run.stop()
    next(run.batches(Points(augment=False), global_batch=16, num_epochs=1))
    with pytest.raises(BadInput, match="made after the run had begun to train"):
        run.batches(Points(augment=False), global_batch=16, num_epochs=1)


def test_what_has_no_state_cannot_be_protected() -> None:
    with pytest.raises(BadInput, match="counter is a int, which cannot be restored in place"):
        attach().protect(counter=3)  # type: ignore[arg-type]


def test_a_snapshot_of_another_config_is_refused_and_the_fields_are_named(tmp_path: Path) -> None:
    run_to_end(tmp_path, Task(epochs=1))
    with pytest.raises(
        BadInput, match=r"step 6 in .* is of another model or config .batch is 32, not 16.*constant.* run\.world_size"
    ):
        run_to_end(tmp_path, Task(epochs=1, batch=32))
    with pytest.raises(BadInput, match="seed is 7, not 0") as refused:
        run_to_end(tmp_path, Task(epochs=1), seed=7)
    assert "world_size" not in str(refused.value)


def test_a_snapshot_of_another_model_is_refused_and_the_fields_are_named(tmp_path: Path) -> None:
    run_to_end(tmp_path, Task(epochs=1))
    with pytest.raises(
        BadInput, match=r"\(model\.0\.weight is float32\[800, 20\], not float32\[30, 20\]; .*and 1 more"
    ):
        run_to_end(tmp_path, Task(epochs=1, model="wide"))
    with pytest.raises(BadInput, match=r"model\.last\.weight is new; .* more\): train with what it was saved with"):
        run_to_end(tmp_path, Task(epochs=1, model="backwards"))
    run = attach(tmp_path)
    net = network(Task())
    with pytest.raises(BadInput, match="ema was not protected; optimizer is no longer protected"):
        run.protect(model=net, scheduler=nn.Identity(), scaler=nn.Identity(), ema=nn.Identity())


def test_the_run_says_who_it_is(tmp_path: Path) -> None:
    run = attach(tmp_path)
    assert (run.rank, run.world_size, run.attempt) == (0, 1, 1)
    assert run.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert attach(tmp_path).attempt == 2
    assert Run.log.__doc__
    assert json.loads((tmp_path / "history" / "rank-0.jsonl").read_text().splitlines()[1])["pid"] == os.getpid()


def test_a_model_is_the_users_own_when_alone() -> None:
    net = nn.Linear(1, 1)
    assert attach().replicate(net) is net


def test_every_attempt_draws_the_same_first_numbers() -> None:
    drawn = []
    for _ in range(2):
        attach(seed=3)
        drawn.append((float(torch.rand(())), float(np.random.random())))
    assert drawn[0] == drawn[1]
