"""Bad input of `holdfast serve` gives one clear line, exit status 2 and no traceback, before anything starts."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli import app, main
from holdfast.errors import HoldfastError
from holdfast.server import cluster
from holdfast.workloads.registry import own_error

WITHOUT_RAY = "import sys; sys.modules['ray'] = None; from holdfast.cli import main; main()"
HALF_A_MODEL = """
import numpy as np
from holdfast.workloads.model import Model

class Half(Model):
    criterion = 1.0
    def start(self, stream=0):
        return {"x": np.ones((4, 2))}
    def compute(self, part, when, pulled, summed):
        raise NotImplementedError

def workload(data):
    return Half()
"""


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """Return the error of the command, which must be one line on stderr with exit status 2."""
    monkeypatch.setattr(sys, "argv", ["holdfast", "serve", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nodes", "65"], "65 nodes are more than the 64 blocks of mlr-digits: use fewer"),
        (["--fraction", "2"], "The fraction of a policy must be in (0, 1] (got 2)."),
        (["--fraction", "0"], "The fraction of a policy must be in (0, 1] (got 0)."),
        (["--fraction", "-1/4"], "The fraction of a policy must be in (0, 1] (got -1/4)."),
        (["--fraction", "much"], "'much' is not a fraction"),
        (["--policy", "best"], "There is no policy 'best': choose one of full, priority"),
        (["--restore", "none"], "--restore must be one of full, partial, fresh (got 'none')."),
        (["--saves", "soon"], "Saves cannot start 'soon': choose one of regular, early, early-full"),
        (["--address", "127.0.0.1:1"], "there is no Ray cluster at 127.0.0.1:1"),
        (["--address", "nowhere"], "there is no Ray cluster at nowhere"),
        (["--workload", "nothing"], "There is no workload 'nothing': choose one of mlr-digits"),
        (["--workload", "nothing.py"], "There is no Python file nothing.py"),
        (["--inject", "kill@3,node=2"], "cannot kill node 2: there are 2 at the start"),
        (["--inject", "kill,node=1"], "--inject kill,node=1 is not understood"),
        (
            ["--workers", "1000000"],
            "1000002 nodes and workers need 6.25e+04 GiB of memory or more, and this machine has",
        ),
        (["--inject", "kill@9", "--iterations", "9"], "No process can be killed at iteration 9: the run ends after 9"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_impossible_options_are_refused_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    expected: str,
) -> None:
    line = refused(capsys, monkeypatch, "train", "--workload", "mlr-digits", "--out", str(tmp_path / "run"), *words)

    assert expected in line
    assert not (tmp_path / "run" / "history").exists()


def test_a_model_without_required_functions_is_refused_with_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half.py").write_text(HALF_A_MODEL)
    (tmp_path / "empty.py").write_text("")

    told = [
        refused(capsys, monkeypatch, "train", "--out", str(tmp_path / "run"), "--workload", str(tmp_path / name))
        for name in ("half.py", "empty.py")
    ]

    assert told[0].endswith("a Half, lacks part, apply, measure")
    assert told[1].endswith("has no function workload(data): define one that returns the model.")


def test_without_ray_the_extra_is_named(tmp_path: Path) -> None:
    words = ["serve", "train", "--workload", "mlr-digits", "--out", str(tmp_path / "run")]
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY, *words], capture_output=True, text=True, timeout=120, check=False
    )

    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        "holdfast: The parameter server needs Ray, which is not installed: pip install 'holdfast[ray]'."
    ]


def test_a_file_that_hides_a_package_which_ray_imports_is_named(tmp_path: Path) -> None:
    attr = tmp_path / "attr.py"  # Ray imports jsonschema, which imports the package attrs, which imports attr
    attr.touch()
    words = ["serve", "train", "--workload", "mlr-digits", "--out", str(tmp_path / "run")]
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast", *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )

    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("holdfast: The parameter server needs Ray, which is installed, but its import failed: ")
    assert line.endswith(f" {attr} has the name of the installed package attr and hides it: rename the file.")


@pytest.mark.skipif(os.name != "posix" or not Path("/proc/self").exists(), reason="needs /proc, which takes no files")
def test_a_store_that_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    words = ["train", "--workload", "mlr-digits", "--out", str(tmp_path / "run"), "--checkpoints"]

    assert "cannot write /proc/nothing" in refused(capsys, monkeypatch, *words, "/proc/nothing")
    assert "a file is in the place of a directory" in refused(capsys, monkeypatch, *words, str(tmp_path / "file"))


@pytest.fixture
def somebody_else() -> Iterator[str]:
    """An address at which a silent server listens that is not a Ray cluster."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_an_address_without_a_ray_cluster_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, somebody_else: str
) -> None:
    monkeypatch.setattr(cluster, "CONNECT_WITHIN", 0.5)
    began = time.monotonic()
    words = ["train", "--workload", "mlr-digits", "--out", str(tmp_path / "run"), "--address", somebody_else]

    assert f"there is no Ray cluster at {somebody_else}" in refused(capsys, monkeypatch, *words)
    assert time.monotonic() - began < 30


def test_a_run_that_does_not_exist_or_is_done_is_not_joined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ("status", "join"):
        assert "There is no parameter server run in" in refused(capsys, monkeypatch, command, str(tmp_path))


def test_errors_reach_the_caller_of_the_command_as_holdfast_raises_them(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "status", str(tmp_path)])

    assert isinstance(result.exception, HoldfastError)


def test_an_error_in_a_user_model_is_reported_with_its_line() -> None:
    traceback = """ray::Controller.train() (pid=1)
  File "/home/me/holdfast/server/worker.py", line 88, in compute
  File "/home/me/web.py", line 9, in workload
  File "/home/me/web.py", line 5, in compute
    return 1 / 0
ZeroDivisionError: division by zero"""

    assert own_error(traceback, "models/web.py") == (
        "models/web.py failed in compute, line 5: ZeroDivisionError: division by zero"
    )
    assert own_error(traceback, "mlr-digits") is None
    assert own_error(traceback, "other.py") is None
