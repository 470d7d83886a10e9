"""The price of live recovery for a sharded model: the formulas, real ranks that follow them, and published lags."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from holdfast.advice.estimate import GIVEN
from holdfast.advice.question import bytes_in_words, in_words, size_of
from holdfast.advice.shard_costs import LAGS, LAGS_FROM, ShardCosts, lag_of
from holdfast.errors import BadInput
from repository import ROOT
from supervisor_process import RunScript


def costs(parameters: float, ranks: int, *, in_step: bool = False) -> ShardCosts:
    return ShardCosts(parameters=parameters, ranks=ranks, basis=GIVEN, bandwidth=25e9, step=2.0, in_step=in_step)


@pytest.mark.parametrize(
    ("parameters", "ranks", "copied", "sent"), [(7e9, 64, "1.31 GB", "438 MB"), (70e9, 512, "1.64 GB", "547 MB")]
)
def test_a_copy_takes_12_bytes_and_each_step_sends_4_for_each_parameter_of_a_shard(
    parameters: float, ranks: int, copied: str, sent: str
) -> None:
    shards = costs(parameters, ranks)
    assert bytes_in_words(shards.copy_bytes) == copied
    assert bytes_in_words(shards.sent_bytes) == bytes_in_words(shards.kept_bytes) == sent
    assert shards.slower("replay") == 1 + shards.sent_bytes / 25e9 / 2
    assert shards.slower("partial") == shards.slower("restart") == 1
    assert copied in shards.lines(Fraction(1, ranks))[0]


def test_a_step_that_was_measured_under_replay_is_not_made_slower_once_more() -> None:
    assert costs(7e9, 64, in_step=True).slower("replay") == 1
    assert "which the steps of this run contain" in costs(7e9, 64, in_step=True).lines(Fraction(1, 64))[0]


def test_replay_and_partial_cost_the_same_at_the_failure_rate_that_is_named() -> None:
    shards = costs(7e9, 64)
    lag = lag_of(Fraction(1, 64))
    assert lag is not None
    even = lag.high * shards.step**2 / shards.delay  # seconds between failures
    assert even * (shards.slower("replay") - 1) == pytest.approx(lag.high * shards.step)
    assert f"every {in_words(even)}." in shards.lines(Fraction(1, 64))[1]


def test_the_lag_is_that_of_the_next_larger_part_that_was_measured() -> None:
    assert lag_of(Fraction(1, 512)) == lag_of(Fraction(1, 8)) == LAGS[Fraction(1, 8)]
    assert lag_of(Fraction(3, 8)) == LAGS[Fraction(1, 2)]
    assert lag_of(Fraction(2, 3)) is None


def test_lags_are_those_of_the_published_experiment() -> None:
    full = ROOT / "docs" / "results" / "sharded-tradeoff" / "result.json"
    result = full if full.exists() else ROOT / "docs" / "results" / "sharded-tradeoff-quick" / "result.json"
    assert str(result.parent.relative_to(ROOT)) == LAGS_FROM
    rows = [
        row for row in json.loads(result.read_text())["rows"] if row["kind"] == "trial" and row["strategy"] == "fresh"
    ]
    measured = {}
    for lost in LAGS:
        lags = [row["lag"] for row in rows if row["lost"] == str(lost)]
        high = np.abs(np.percentile(lags, (5, 95))).max()
        measured[str(lost)] = [round(max(0.0, float(value)), 1) for value in (np.mean(lags), 0, high)]
    assert {str(lost): [lag.value, lag.low, lag.high] for lost, lag in LAGS.items()} == measured


def test_four_ranks_keep_and_send_as_many_bytes_as_the_formula_says(run_script: RunScript, tmp_path: Path) -> None:
    run_script("shard_sizes.py", tmp_path)
    measured = json.loads((tmp_path / "sizes.json").read_text())
    expected = costs(measured["parameters"], 4)
    assert measured["copied"] == [expected.copy_bytes] * 4
    assert measured["sent"] == [expected.sent_bytes] * 4


@pytest.mark.parametrize(
    ("text", "size"), [("7B", 7e9), ("350M", 3.5e8), ("25GB", 25e9), ("1.5 TB", 1.5e12), ("80", 80)]
)
def test_sizes_are_read_as_people_write_them(text: str, size: float) -> None:
    assert size_of(text, "--parameters") == pytest.approx(size)


@pytest.mark.parametrize("text", ["B", "7 X", "-7B", "0", ""])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"--parameters .* is not a size above 0"):
        size_of(text, "--parameters")
