"""A run's config is checked once, survives JSON, and says which run it is."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import BadInput
from holdfast.events import Seconds, Step
from holdfast.faults.schedule import Failure
from holdfast.history.log import HistoryWriter
from holdfast.runs.config import FAULTS, IDENTITY, WRITERS, RunConfig, read_config
from holdfast.sampler.digest import Samples
from holdfast.supervise.run_folder import differing, with_seed_of

counts = st.integers(1, 64)
configs = st.builds(
    RunConfig,
    script=st.text(min_size=1),
    args=st.lists(st.text()).map(tuple),
    workers=counts,
    save_every=counts,
    writer=st.sampled_from(WRITERS),
    max_inflight=counts,
    keep_last=counts,
    max_restarts=st.integers(0, 9),
    seed=st.none() | st.integers(),
    failures=st.lists(st.builds(Failure, step=counts, kind=st.sampled_from(FAULTS))).map(tuple),
    workers_after=st.lists(counts).map(tuple),
    hang_timeout=st.none() | st.floats(0.1, 100),
)


@given(configs)
def test_a_config_comes_back_from_json(config: RunConfig) -> None:
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@given(configs, configs)
def test_two_configs_are_of_one_run_when_their_fingerprints_are_equal(one: RunConfig, other: RunConfig) -> None:
    assert (one.fingerprint == other.fingerprint) == (not differing(one, other))
    assert set(differing(one, other)) <= set(IDENTITY)


@given(configs, st.integers(0, 20))
def test_the_kth_restart_has_the_kth_number_of_workers_and_the_last_one_stays(config: RunConfig, restart: int) -> None:
    expected = [config.workers, *config.workers_after]
    assert config.workers_at(restart) == (expected[restart] if restart < len(expected) else expected[-1])


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("workers", 0, "--workers must be 1 or more (got 0)."),
        ("workers_after", (2, -1), "--workers must be 1 or more (got -1)."),
        ("recovery", "pray", "there is no recovery 'pray': choose restart"),
        ("writer", "fast", "there is no writer 'fast': choose overlapped or blocking"),
        ("failures", (Failure(step=1, kind="lose"),), "there is no fault 'lose': choose exit, kill, hang"),
        ("save_every", 0, "--save-every must be 1 or more (got 0)."),
        ("max_restarts", -1, "--max-restarts must be 0 or more (got -1)."),
        ("hang_timeout", 0.0, "--hang-timeout must be greater than 0 (got 0)."),
        ("replace_slow", 1.0, "--replace-slow must be 1.25 or more (got 1)"),
        ("replace_slow", 1.5, "add --spares 1 and a live recovery"),
        ("save_bandwidth", 0, "--save-bandwidth must be 1 byte a second or more (got 0)."),
    ],
)
def test_a_config_that_cannot_be_run_is_refused_in_one_line(field: str, value: object, line: str) -> None:
    with pytest.raises(BadInput) as refused:
        RunConfig(script="train.py", **{field: value})  # type: ignore[arg-type]
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_limit_of_the_bandwidth_is_refused_where_training_would_wait_for_it() -> None:
    with pytest.raises(BadInput, match="leave one of the two out"):
        RunConfig(script="train.py", writer="blocking", save_bandwidth=1000)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"script": "a", "speed": 3}', '{"script": "a", "workers": "many"}'])
def test_a_run_json_that_is_not_a_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(BadInput):
        read_config(tmp_path)
    with pytest.raises(BadInput, match="holds no run"):
        read_config(tmp_path / "elsewhere")


def test_a_run_folder_of_another_version_is_refused_with_the_settings_it_has(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"script": "a.py", "hang_after": null, "stuck_after": 5.0}')
    with pytest.raises(BadInput, match="another version of holdfast wrote it, with hang_after, stuck_after"):
        read_config(tmp_path)


def test_a_foreign_run_json_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "run.json"

    def refused() -> str:
        with pytest.raises(BadInput) as error:
            read_config(tmp_path)
        assert "\n" not in str(error.value)
        return str(error.value)

    os.mkfifo(path)
    assert "run.json" in refused()  # at once, although no process writes to it
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "run.json" in refused()
    path.unlink()
    path.touch()
    os.truncate(path, 6 << 30)
    assert "run.json" in refused()
    for text in (
        "[" * 100_000,
        "[]",
        "{}",
        '{"script": 3}',
        '{"script": "x", "args": [NaN]}',
        '{"script": "x", "args": 3}',
    ):
        os.truncate(path, 0)
        path.write_text(text)
        refused()


def test_a_command_without_a_seed_uses_that_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(RunConfig(script="a.py", seed=0).to_json()))  # as all had before
    assert with_seed_of(tmp_path, RunConfig(script="a.py")).seed is None  # nothing was trained yet
    with HistoryWriter(tmp_path / "history", "rank-0") as history:
        history.append(Step(1, 1, 0, 0, 0, 0, Samples.of([1]), Seconds(0.0, 0.0, 0.0)))
    assert with_seed_of(tmp_path, RunConfig(script="a.py")).seed == 0
    assert with_seed_of(tmp_path, RunConfig(script="a.py", seed=5)).seed == 5
    assert with_seed_of(tmp_path / "new", RunConfig(script="a.py")).seed is None
