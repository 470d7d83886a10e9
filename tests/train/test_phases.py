"""Several loops of one script are phases of one run; what cannot work is refused before anything is trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from attached_runs import attach, close_attached_runs  # noqa: F401 - an autouse fixture
from finished_run import failed_checks
from holdfast.errors import BadInput
from holdfast.train.guards import late_loop
from holdfast.train.run import Run


class Training:
    """A run with a model, and what its loops have trained."""

    def __init__(self, *out: Path, **options: Any) -> None:
        self.run: Run = attach(*out, save_every=2, **options)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.run.protect(model=self.model, optimizer=self.optimizer)
        self.ids: list[list[int]] = []

    def loop(self, samples: int = 8, **how: Any) -> Any:
        data = TensorDataset(torch.arange(float(samples))[:, None])
        return self.run.batches(data, **{"global_batch": 2, "num_epochs": 1, **how})

    def train(self, batches: Any, stop: int | None = None) -> list[int]:
        """Train a loop, or a part of it; return the numbers of its steps."""
        steps: list[int] = []
        for batch in batches:
            if batch.step == stop:
                break
            steps.append(batch.step)
            self.ids.append(batch.ids.tolist())
            self.model(batch[0]).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return steps


def test_every_phase_counts_its_steps_and_batches_from_zero(tmp_path: Path) -> None:
    training = Training(tmp_path)
    first, second = training.loop(), training.loop(12, num_epochs=2, global_batch=3)
    assert (len(first), len(second)) == (4, 8)
    assert training.train(first) == [0, 1, 2, 3]
    assert training.train(second) == list(range(8))
    training.run.close()
    assert failed_checks(tmp_path) == []


def interrupt_in_second_phase(out: Path) -> None:
    """Train the first phase of a run in `out`, and the second up to its step 3."""
    training = Training(out)
    first, second = training.loop(), training.loop()
    training.train(first)
    training.train(second, stop=3)
    del first, second
    training.run.close()


def test_a_run_that_resumes_in_its_second_phase_trains_only_the_rest_of_it(tmp_path: Path) -> None:
    interrupt_in_second_phase(tmp_path)
    resumed = Training(tmp_path)
    first, second = resumed.loop(), resumed.loop()
    assert (first.initial, second.initial) == (4, 2)
    assert (resumed.train(first), resumed.train(second)) == ([], [2, 3])
    resumed.run.close()
    assert failed_checks(tmp_path) == []


def test_two_phases_over_one_dataset_have_orders_of_their_own(tmp_path: Path) -> None:
    training = Training(tmp_path)
    for loop in (training.loop(64, global_batch=32), training.loop(64, global_batch=32)):
        training.train(loop)
    assert training.ids[:2] != training.ids[2:]


def test_phases_are_trained_in_their_order_and_to_their_end() -> None:
    training = Training()
    first, second = training.loop(), training.loop()
    with pytest.raises(BadInput, match="loop 2 of this run was begun before loop 1 was trained"):
        training.train(second)
    training = Training()
    first, second = training.loop(), training.loop()
    training.train(first, stop=2)
    with pytest.raises(BadInput, match="loop 1 of this run is not trained to its end, and loop 2 was begun"):
        training.train(second)


def test_a_stopped_run_trains_no_later_phase() -> None:
    training = Training()
    first, second = training.loop(), training.loop()
    for batch in first:
        training.model(batch[0]).sum().backward()
        training.optimizer.step()
        training.run.stop()
    assert training.train(second) == []


def test_a_finished_run_can_be_extended_by_a_phase(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.train(training.loop())
    training.run.close()
    again = Training(tmp_path)
    first, second = again.loop(), again.loop()
    with pytest.raises(BadInput, match="give --extend to train it for longer"):
        again.train(first)
    again.run.close()
    longer = Training(tmp_path, extend=True)
    first, second = longer.loop(), longer.loop()
    assert (longer.train(first), longer.train(second)) == ([], [0, 1, 2, 3])
    longer.run.close()
    assert failed_checks(tmp_path) == []


def test_a_phase_that_differs_from_the_saved_one_is_refused_before_training(tmp_path: Path) -> None:
    interrupt_in_second_phase(tmp_path)
    resumed = Training(tmp_path)
    with pytest.raises(BadInput, match="epochs is 2, not 1"):
        resumed.loop(num_epochs=2)
    resumed.loop()
    with pytest.raises(BadInput, match="batch is 4, not 2"):
        resumed.loop(global_batch=4)


INLINE = """
import holdfast as hf
run = hf.attach()
for x, y in run.batches(pretraining, global_batch=8, num_epochs=1):
    train(x, y)
{between}
for number, (x, y) in enumerate(run.batches(finetuning, global_batch=8, num_epochs=1)):
    train(x, y)
"""


def test_a_script_that_would_make_its_second_loop_too_late_is_recognised(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(INLINE.format(between="freeze(model)"))
    assert late_loop(script) == 7
    script.write_text(INLINE.replace("for number", "if finetune:\n  for number").format(between=""))
    assert late_loop(script) is None  # the script may make one of them only
    script.write_text(INLINE.replace("run.batches", "other.batches").format(between=""))
    assert late_loop(script) is None
