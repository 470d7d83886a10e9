"""The GPT of sharded-tradeoff: its training repeats exactly from a state, on text that it does not validate on."""

from pathlib import Path

import pytest
import torch

from holdfast.errors import BadInput
from holdfast.lab.sharded.gpt_training import Gpt, GptTraining, weight_distance
from holdfast.lab.sharded.shard_failures import FULL, GptSize
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
    training = GptTraining(SIZE, load_text(text, 10**9), 3, CPU)
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
    training = GptTraining(SIZE, load_text(text, 10**9), 3, CPU)
    first, rates = training.state(), []
    for step in range(6):
        rates.append(training.rate)
        training.train(step)
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])
    training.load(first)
    assert training.rate == rates[0]


def test_the_full_model_has_more_than_100_million_parameters() -> None:
    with torch.device("meta"):
        assert 110e6 < sum(parameter.numel() for parameter in Gpt(FULL.model).parameters()) < 120e6
