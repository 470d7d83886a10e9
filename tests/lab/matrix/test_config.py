"""A matrix in a file: what it says, what it comes to in runs, and every mistake with its line."""

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from holdfast.errors import BadInput, Corrupt, DataMissing
from holdfast.faults.schedule import Failure
from holdfast.lab.experiment import Options, Progress
from holdfast.lab.matrix import recovery_matrix
from holdfast.lab.matrix.config import Matrix, line_of, read_matrix
from holdfast.lab.matrix.models_and_data import PreparedData, prepare_dataset
from holdfast.lab.matrix.suites import (
    PlannedRun,
    Suite,
    all_suites,
    config_digest,
    expected_restarts,
    failure_schedule,
    planned_runs,
    run_config,
)
from holdfast.workloads.images import cifar100
from repository import ROOT

EXPERIMENTS = ROOT / "experiments"
GOOD = """\
steps = 100
batch = 32
seeds = [1, 2]
datasets = ["digits", "cifar10"]
models = [
  "mlp",
  "resnet18",
]

[failures.base]
steps = [40, 20]
kind = "kill"
ranks = [1]

[[failures.disk]]
steps = [30]
kind = "io-error"

[[failures.disk]]
steps = [10]
point = "backward=0.5"
"""


def read(folder: Path, text: str) -> Matrix:
    (folder / "m.toml").write_text(text)
    return read_matrix(folder / "m.toml")


def test_a_file_defines_what_is_trained_and_what_fails(tmp_path: Path) -> None:
    matrix = read(tmp_path, GOOD)
    assert (matrix.steps, matrix.batch, matrix.seeds, matrix.workers, matrix.save_every) == (100, 32, (1, 2), 4, 50)
    assert matrix.variants == ("reference", "blocking", "overlapped", "replay", "forward", "skip")
    assert matrix.failures["base"] == (
        Failure(step=20, kind="kill", targets=(1,)),
        Failure(step=40, kind="kill", targets=(1,)),
    )
    assert matrix.failures["disk"] == (
        Failure(step=10, kind="exit", point="backward=0.5", targets=(0,)),
        Failure(step=30, kind="io-error"),
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("batch = 32", "batches = 32", r"line 2: there is no key 'batches'; the keys are steps, batch"),
        ("batch = 32", "batch = 0", "line 2: batch is 0: give a whole number of 1 or more"),
        ('"cifar10"', '"cifar11"', "line 4: there is no data set 'cifar11': choose cifar10"),
        ('  "resnet18",', '  "resnet19",', "line 7: there is no model 'resnet19'"),
        ("[failures.base]", "[failure.base]", "line 10: there is no key 'failure'"),
        ("steps = [40, 20]", "steps = [40, 200]", "line 11: no failure can strike before step 200: the last is 99"),
        ('kind = "kill"', 'kind = "died"', "line 12: there is no kind 'died'"),
        ("ranks = [1]", "rank = [1]", "line 13: there is no key 'rank'; the keys of failures.base are"),
        ("ranks = [1]", "ranks = [4]", "line 13: there is no rank 4: the ranks are 0 to 3"),
        ('kind = "io-error"', 'kind = "io_error"', "line 17: there is no kind 'io_error'"),
        ('"backward=0.5"', '"backward"', "line 21: backward needs the fraction"),
        ("seeds = [1, 2]", "seeds = [1, 1]", "line 3: seeds names 1 twice"),
        ("seeds = [1, 2]", "seeds = 1", "line 3: seeds is 1: give a list"),
        ("batch = 32", "batch = 2", "line 2: 4 workers cannot share 2 samples"),
        ("batch = 32", "batch = ", "is not TOML: .*line 2"),
        ("seeds = [1, 2]", "", "has no seeds: add it"),
    ],
)
def test_an_error_names_the_line_of_the_mistake(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(BadInput, match=message) as caught:
        read(tmp_path, GOOD.replace(old, new, 1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("workers = [2]", "line 24: there is no key 'workers'; the keys of sweep are save_every"),
        ("workers_after = [[2]]", "line 24: workers_after needs restarts, and replay has none"),
        ("save_every = [0]", "line 24: save_every is"),
        ('checkpoints = ["disk"]', "line 24: checkpoints is .*directory, tmpfs or URLs"),
    ],
)
def test_an_error_names_the_line_of_a_mistake_in_a_sweep(tmp_path: Path, sweep: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read(tmp_path, f"{GOOD}\n[sweep]\n{sweep}\n")


def test_a_missing_file_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"cannot read .*No such file"):
        read_matrix(tmp_path / "none.toml")


def test_lines_are_found_whatever_way_a_key_is_written() -> None:
    text = 'a = 1\nfailures.base.steps = [\n  2,\n  12 ]\n[[x . "y"]]\nk=1\n[[x.y]]\n"k" = 2\n'
    assert line_of(text, "", "a") == 1
    assert line_of(text, "failures.base", "steps") == 2
    assert line_of(text, "failures.base", "steps", 12) == 4
    assert [line_of(text, "x.y", "k", nth=nth) for nth in (0, 1)] == [6, 8]
    assert line_of(text, "x.y") == 5
    assert line_of(text, "", "nothing") == 0


def test_every_combination_is_a_suite_and_every_suite_runs_in_every_variant_and_seed(tmp_path: Path) -> None:
    matrix = read(tmp_path, f'variants = ["reference", "blocking"]\n{GOOD}\n[sweep]\nsave_every = [5, 10]\n')
    several = all_suites(matrix)
    assert len(several) == 2 * 2 * 2 * 2
    assert several[1].name == "digits-mlp-base-save_every=10"
    assert several[1].axes == {"dataset": "digits", "model": "mlp", "failures": "base", "save_every": "10"}
    every = list(planned_runs(matrix, several))
    assert len(every) == len(set(every)) == 16 * 2 * 2
    assert [unit.variant for unit in every[:2]] == ["reference", "blocking"]  # what is compared follows each other


def test_the_config_of_a_run_follows_its_suite_and_variant(tmp_path: Path) -> None:
    matrix = read(tmp_path, GOOD)
    suite, data = Suite("digits", "mlp", "base", (("save_every", 5),)), PreparedData(tmp_path, 100, 10)
    configs = {name: run_config(matrix, PlannedRun(suite, name, 2), data, None) for name in matrix.variants}
    assert {name: (c.recovery, c.writer, len(c.failures)) for name, c in configs.items()} == {
        "reference": ("restart", "blocking", 0),
        "blocking": ("restart", "blocking", 2),
        "overlapped": ("restart", "overlapped", 2),
        "replay": ("replay", "overlapped", 2),
        "forward": ("forward", "overlapped", 2),
        "skip": ("skip", "overlapped", 2),
    }
    assert {config.seed for config in configs.values()} == {2}
    assert configs["skip"].save_every == 5
    assert configs["skip"].keep_last >= 100 // 5  # all stay until they are compared
    assert len({config.failures for name, config in configs.items() if name != "reference"}) == 1


def test_a_run_is_known_again_wherever_it_lies_and_only_with_the_same_settings(tmp_path: Path) -> None:
    matrix = read(tmp_path, GOOD)
    unit = PlannedRun(Suite("digits", "mlp", "base"), "blocking", 1)
    here, there = (
        run_config(matrix, unit, PreparedData(tmp_path / name / "digits", 9, 10), None) for name in ("a", "b")
    )
    assert config_digest(here) == config_digest(there)
    other = run_config(matrix, PlannedRun(unit.suite, "blocking", 2), PreparedData(tmp_path / "digits", 9, 10), None)
    assert config_digest(other) != config_digest(here)


def test_restarts_follow_from_the_failures_that_end_a_process(tmp_path: Path) -> None:
    matrix = read(tmp_path, GOOD.replace("ranks = [1]", "ranks = [1, 2]"))
    count = {v: expected_restarts(matrix, PlannedRun(Suite("digits", "mlp", "base"), v, 1)) for v in matrix.variants}
    assert count == {"reference": 0, "blocking": 2, "overlapped": 2, "replay": 0, "forward": 0, "skip": 0}
    assert (
        expected_restarts(matrix, PlannedRun(Suite("digits", "mlp", "disk"), "blocking", 1)) == 1
    )  # a refused save is tried again
    assert failure_schedule(matrix, PlannedRun(Suite("digits", "mlp", "disk"), "reference", 1)) == ()


@pytest.mark.parametrize(
    "file", sorted([*EXPERIMENTS.glob("*.toml"), recovery_matrix.QUICK]), ids=lambda file: file.name
)
def test_every_matrix_that_comes_with_holdfast_makes_sense(file: Path, tmp_path: Path) -> None:
    matrix = read_matrix(file)
    for unit in planned_runs(matrix, all_suites(matrix)):
        run_config(matrix, unit, PreparedData(tmp_path, 100, 10), None).check_world(1)


def test_the_papers_matrix_is_the_papers() -> None:
    matrix = read_matrix(EXPERIMENTS / "matrix-paper.toml")
    assert len(all_suites(matrix)) == 8
    assert (matrix.steps, matrix.seeds, matrix.workers) == (1600, (1337, 2027, 4242), 4)
    assert (matrix.save_every, matrix.max_inflight) == (50, 4)
    assert [[each.step for each in matrix.failures[name]] for name in ("base", "late")] == [[400, 1200], [800, 1400]]


def silent(what: str, total: int) -> Progress:
    return lambda done: None


def test_a_matrix_needs_a_file_or_quick_and_not_both(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="needs --config FILE"):
        recovery_matrix.run(Options(out=tmp_path), silent)
    with pytest.raises(BadInput, match="not both"):
        recovery_matrix.run(Options(out=tmp_path, quick=True, config=tmp_path / "m.toml"), silent)


def test_missing_cifar_100_is_refused_before_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "m.toml").write_text(GOOD.replace('"digits", "cifar10"', '"digits", "cifar100"'))
    with pytest.raises(DataMissing, match=r"cifar100: no cifar-100-binary.tar.gz in .*--data DIR"):
        recovery_matrix.run(Options(out=tmp_path / "out", data=tmp_path, config=tmp_path / "m.toml"), silent)
    assert not (tmp_path / "out" / "runs").exists()


def test_cifar_100_is_read_from_its_archive_with_its_fine_classes(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
    records = b"".join(
        bytes([group, fine]) + each.tobytes() for group, fine, each in zip((1, 2, 3), (70, 0, 99), pixels, strict=True)
    )
    with tarfile.open(tmp_path / "cifar-100-binary.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("cifar-100-binary/train.bin")
        entry.size = len(records)
        archive.addfile(entry, io.BytesIO(records))
    images = cifar100(tmp_path, train=2)
    assert images.y.tolist() == [70, 0]
    assert np.array_equal(images.x, pixels[:2])
    (tmp_path / "cifar-100-binary.tar.gz").write_bytes(b"damaged")
    with pytest.raises(Corrupt, match="fetch it again"):
        cifar100(tmp_path)


def test_a_data_set_is_read_once_and_kept(tmp_path: Path) -> None:
    first = prepare_dataset("digits", None, tmp_path)
    assert (first.samples, first.classes) == (1797, 10)
    kept = (tmp_path / "digits" / "x.npy").stat().st_mtime_ns
    assert prepare_dataset("digits", None, tmp_path) == first
    assert (tmp_path / "digits" / "x.npy").stat().st_mtime_ns == kept


def test_a_pipe_is_refused_instead_of_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "matrix.toml")
    with pytest.raises(BadInput, match="is not a file: name a TOML file"):
        read_matrix(tmp_path / "matrix.toml")
