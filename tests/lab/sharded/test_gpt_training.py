"""The GPT of sharded-tradeoff: its training repeats exactly from a state, on text that it does not validate on."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from holdfast.errors import BadInput
from holdfast.lab.sharded.cuda_graphs import Body, Recorder, recorded
from holdfast.lab.sharded.gpt_training import Gpt, GptState, GptTraining, weight_distance
from holdfast.lab.sharded.shard_failures import FULL, GptSize
from holdfast.lab.sharded.shard_trials import prepared_device
from holdfast.lab.sharded.training_text import PIECE, load_text

SIZE = GptSize(width=8, layers=1, heads=2, context=8, batch=2, rate=1e-2, warm_up=4)
CPU = torch.device("cpu")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(b"".join(bytes([number]) * PIECE for number in range(32)))
    return path


def test_one_piece_in_sixteen_is_held_out(text: Path) -> None:
    loaded = load_text(text, 10**9)
    assert set(loaded.held_out.tolist()) == {15, 31}
    assert len(loaded.trained) == 30 * PIECE
    assert not {15, 31} & set(loaded.trained.tolist())
    assert len(load_text(text, 20 * PIECE).trained) == 19 * PIECE


def test_without_a_file_the_text_is_the_standard_library() -> None:
    loaded = load_text(None, 2_000_000)
    assert b"import" in loaded.trained.tobytes()
    assert loaded.digest == load_text(None, 2_000_000).digest


def test_a_text_that_is_missing_or_too_short_is_refused(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"too short")
    with pytest.raises(BadInput, match="has 9 bytes of text"):
        load_text(short, 10**6)
    with pytest.raises(BadInput, match="cannot read the text"):
        load_text(tmp_path, 10**6)


def test_training_from_a_state_repeats_exactly(text: Path) -> None:
    training = GptTraining(SIZE, load_text(text, 10**9), 3, CPU, positions=6)
    first = training.state()
    assert not any(rows.first_moment.any() for rows in first.parameters)

    def trained() -> list[torch.Tensor]:
        for step in range(6):
            training.train(step)
        return training.weights()

    once = trained()
    assert weight_distance(once, first.weights()) > 0
    training.load(first)
    assert weight_distance(trained(), once) == 0


def test_the_learning_rate_rises_during_the_warm_up_and_goes_back_with_the_state(text: Path) -> None:
    training = GptTraining(SIZE, load_text(text, 10**9), 3, CPU, positions=6)
    first, rates = training.state(), []
    for step in range(6):
        rates.append(training.rate)
        training.train(step)
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])
    training.load(first)
    assert training.rate == rates[0]


def test_an_averaged_loss_is_that_of_the_mean_of_the_weights_since_the_last_one(text: Path) -> None:
    training = GptTraining(SIZE, load_text(text, 10**9), 3, CPU, positions=6)
    training.add_weights()
    assert training.averaged_loss() == pytest.approx(training.validation_loss())
    visited = []
    for step in range(3):
        training.train(step)
        training.add_weights()
        visited.append(training.weights())
    averaged = training.averaged_loss()
    with torch.no_grad():
        for parameter, *weights in zip(training.model.parameters(), *visited, strict=True):
            parameter.copy_(sum(weights[1:], weights[0]) / 3)
    assert averaged == pytest.approx(training.validation_loss(), rel=1e-6)


def test_steps_move_the_weights_at_their_learning_rate_and_by_their_batch(text: Path) -> None:
    training = GptTraining(SIZE, load_text(text, 10**9), 3, CPU, positions=6)
    first = training.state()

    def moved(position: int, step: int) -> float:
        training.load(GptState(first.parameters, step))
        training.train(position)
        return weight_distance(training.weights(), first.weights())

    assert moved(0, 3) > 2 * moved(0, 0) > 0  # in the fourth step of the warm-up the rate is four times as high
    after = [training.weights() for position in (0, 1) if moved(position, 3)]
    assert weight_distance(*after) > 0


def refuse(bodies: Sequence[Body]) -> list[Body]:
    raise RuntimeError("no graphs here")


def forget(bodies: Sequence[Body]) -> list[Body]:
    return [lambda: None for _ in bodies]


@pytest.mark.parametrize(
    ("record", "warning"), [(list, None), (refuse, "no graphs here"), (forget, "replayed steps differ by")]
)
def test_steps_train_alike_whether_or_not_they_could_be_recorded(
    text: Path, record: Recorder, warning: str | None
) -> None:
    loaded = load_text(text, 10**9)
    with pytest.warns(UserWarning, match=warning) if warning else nullcontext():
        training = GptTraining(SIZE, loaded, 3, CPU, positions=6, record=record)
    plain = GptTraining(SIZE, loaded, 3, CPU, positions=6)
    for step in range(6):
        for run in (training, plain):
            run.train(step)
            run.add_weights()
    assert weight_distance(training.weights(), plain.weights()) == 0
    assert training.averaged_loss() == plain.averaged_loss()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_train_as_eager_steps_do(text: Path) -> None:
    loaded, device = load_text(text, 10**9), prepared_device()
    graphs = GptTraining(SIZE, loaded, 3, device, positions=6, record=recorded)
    eager = GptTraining(SIZE, loaded, 3, device, positions=6)
    first = eager.weights()
    for step in range(6):
        graphs.train(step)
        eager.train(step)
    assert weight_distance(graphs.weights(), eager.weights()) <= 0.05 * weight_distance(first, eager.weights())


def test_the_full_model_has_more_than_100_million_parameters() -> None:
    with torch.device("meta"):
        assert 100e6 < sum(parameter.numel() for parameter in Gpt(FULL.model).parameters()) < 105e6
