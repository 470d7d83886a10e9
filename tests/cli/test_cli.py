"""The command: an answer on stdout, one line on stderr when something is wrong, and an exit status to go by."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fake_histories import FakeHistory, write_history
from holdfast import DirectoryStore, __version__, cli
from holdfast.blocks.division import along
from holdfast.checkpoint import snapshot
from holdfast.checkpoint.digest import seal
from holdfast.checkpoint.running import RunningCheckpoint
from holdfast.events import Launch, Open
from snapshots import saved_by


class Ran:
    """The output and the exit status of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def holdfast(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> object:
    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return Ran(int(ended.value.code or 0), out, err)

    return run


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    store = DirectoryStore(tmp_path / "store")
    for step in (10, 20):
        snapshot.save(store, step, {"w": np.arange(step)}, {"note": step}, epoch=1, cursor=step)
    state = {"w": np.zeros((4, 2))}
    RunningCheckpoint.create(store, along(state, "w"), state).save(7, state, np.array([1]))
    return store.path


def test_inspect_lists_snapshots_and_the_running_checkpoint(holdfast, saved: Path) -> None:  # type: ignore[no-untyped-def]
    ran = holdfast("inspect", saved)
    assert ran.code == 0
    assert "step 10" in ran.out
    assert "step 20" in ran.out
    assert "running checkpoint: 4 blocks, saved at iterations 0 to 7" in ran.out


def test_inspect_shows_how_a_snapshot_is_divided_among_the_workers(holdfast, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    manifest = saved_by(DirectoryStore(tmp_path), 6, 3, {"w": torch.zeros(1000)})
    row = next(line for line in holdfast("inspect", tmp_path).out.splitlines() if "step 6" in line)
    largest = max(shard.length for shard in manifest.shards)
    assert row.split()[4:9] == ["3", f"{manifest.bytes / 1000:.1f}", "kB", f"{largest / 1000:.1f}", "kB"]


def test_verify_passes_a_good_store_and_names_what_is_bad(holdfast, saved: Path) -> None:  # type: ignore[no-untyped-def]
    assert holdfast("verify", saved).code == 0
    payload = saved / "step-00000010" / "shard-00000-of-00001.safetensors"
    payload.write_bytes(payload.read_bytes()[:-1] + b"\xff")
    ran = holdfast("verify", saved)
    assert ran.code == 1
    assert "step-00000010/shard-00000-of-00001.safetensors" in ran.out
    assert "step-00000020" not in ran.out


def test_a_truncated_payload_and_a_future_manifest_are_found(holdfast, saved: Path) -> None:  # type: ignore[no-untyped-def]
    payload = saved / "step-00000020" / "shard-00000-of-00001.safetensors"
    payload.write_bytes(payload.read_bytes()[:20])
    (saved / "step-00000010" / "manifest.json").write_bytes(seal({"format": 99}))
    ran = holdfast("verify", saved)
    assert ran.code == 1
    assert "step-00000020/shard-00000-of-00001.safetensors" in ran.out
    assert "has format 99" in ran.out
    assert holdfast("inspect", saved).code == 1


def test_inspect_fails_if_a_file_of_a_snapshot_is_missing(holdfast, saved: Path) -> None:  # type: ignore[no-untyped-def]
    (saved / "step-00000020" / "shard-00000-of-00001.safetensors").unlink()
    ran = holdfast("inspect", saved)
    assert ran.code == 1
    (line,) = [line for line in ran.out.splitlines() if line.startswith("unreadable")]
    assert "step-00000020/shard-00000-of-00001.safetensors" in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--workers", "0", __file__], "--workers must be 1 or more (got 0)."),
        (["run", "--workers", "99999999999999999999", __file__], "workers need 1.56e+18 GiB of memory or more"),
        (["run", "--workers", "abc", __file__], ". See `holdfast run --help`."),
        (["lab", "run"], ". See `holdfast lab run --help`."),
        (["run", "--writer", "quick", __file__], "there is no writer 'quick'"),
        (["rehearse", "--steps", "1", __file__], "no kill fits into 1 steps"),
        (["rehearse", "--inject", "random=-1", __file__], "--inject random=-1 is not understood"),
        (["rehearse", "no-such-script.py"], "there is no script no-such-script.py"),
        (["rehearse", "--out", Path(__file__).parent, __file__], "is not empty: name another --out"),
        (["run", "--recovery", "hope", __file__], "there is no recovery 'hope'"),
        (["run", "--inject", "fire@3", __file__], "there is no fault 'fire'"),
        (
            ["run", "--inject", "exit@3,rank=9", __file__],
            "cannot inject a failure at rank 9: the ranks of this run are",
        ),
        (["run", "--inject", "kill@soon", __file__], "--inject kill@soon is not understood"),
        (["run", "--inject", "exit@3:backward=2", __file__], "'backward=2' is not a point of a step"),
        (
            ["run", "--inject", "exit@3:sideways", __file__],
            "exit cannot strike at 'sideways': choose boundary, forward",
        ),
        (["run", "--inject", "kill@3,rank=two", __file__], "--inject kill@3,rank=two is not understood"),
        (
            ["run", "--inject", "exit@3:forward,rank=0+1", "--workers", "2", "--recovery", "skip", __file__],
            "All 2 workers would be lost in step 3, and --recovery skip needs a survivor",
        ),
        (["run", "--workers-after", "2,x", __file__], "--workers-after 2,x is not a list of numbers of workers"),
        (["run", "--workers-after", "0", __file__], "--workers-after 0 is not a list of numbers of workers, 1 or more"),
        (["run", "nothing.py"], "there is no script nothing.py"),
        (["run", "--nnodes", "2", __file__], "rendezvous"),
        (["audit", "nowhere"], "there is no history at nowhere"),
        (["cost", "nowhere"], "there is no history at nowhere"),
        (["report", "nowhere"], "there is no folder nowhere"),
        (["report", "."], ". is neither a run nor a result"),
        (["report", ".", "--out", "report.pdf"], "--out report.pdf is not a page"),
        (["watch", "nowhere"], "nowhere is not the folder of a run"),
        (["watch", "nowhere", "--web"], "nowhere is not the folder of a run"),
        (["watch", ".", "--port", "80"], "--port needs --web"),
        (["watch", ".", "--web", "--prometheus"], "cannot be combined"),
        (["inspect", "nowhere"], "nowhere does not exist"),
        (["verify", "."], "neither a snapshot nor a running checkpoint"),
        (["lab", "run", "nope"], "no experiment 'nope'; choose among"),
        (["lab", "run", "qp-bound", "--trials", "0"], "--trials must be 1 or more (got 0)"),
        (["lab", "run", "qp-bound", "--trials", "many"], "'--trials'"),
        (["lab", "run", "qp-bound", "--jobs", "0"], "--jobs must be 1 or more (got 0)"),
        (["lab", "run", "qp-bound", "--panel", "mlr-mnist"], "has no panels"),
        (["lab", "run", "partial-recovery", "--panel", "nope"], "no panel 'nope'"),
        (["lab", "run", "mlr-bound", "--data", "."], "mnist"),
        (["lab", "run", "qp-bound", "--config", "m.toml"], "qp-bound does not read a --config file"),
        (["lab", "run", "recovery-matrix"], "needs --config FILE"),
        (["lab", "run", "recovery-matrix", "--config", "m.toml"], "cannot read m.toml"),
        (["lab", "run", "recovery-matrix", "--config", __file__], "is not TOML: "),
        (["lab", "run", "recovery-matrix", "--quick", "--panel", "nope"], "no suite 'nope'"),
        (["frobnicate"], "frobnicate"),
        (["inspect"], "Missing argument"),
    ],
)
def test_bad_input_is_one_line_that_says_what_and_exit_2(  # type: ignore[no-untyped-def]
    holdfast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOLDFAST_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nothing is fetched in tests
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    ran = holdfast(*arguments)
    assert ran.code == 2
    assert says in ran.err
    assert ran.err.count("\n") == 1
    assert "Traceback" not in ran.err


def test_a_result_folder_that_is_a_file_is_left_alone(holdfast, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "mine").write_text("precious")
    ran = holdfast("lab", "run", "qp-bound", "--quick", "--out", tmp_path / "mine")
    assert ran.code == 2
    assert "is a file" in ran.err
    assert (tmp_path / "mine").read_text() == "precious"


def test_lab_run_prints_claims_names_the_report_and_exits_0_when_they_hold(holdfast, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ran = holdfast("lab", "run", "qp-bound", "--quick", "--trials", 10, "--out", tmp_path)
    assert ran.code == 0
    assert "holds" in ran.out
    assert f"report: {tmp_path / 'report.html'}" in ran.out
    assert (tmp_path / "report.html").exists()


def test_of_a_run_that_died_before_its_loop_each_command_says_so_in_one_line(holdfast, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    run = FakeHistory()
    run.attempt = 1
    run.supervisor(Open(2))
    run.supervisor(Launch(1, 1))
    run.passes("startup", 2.0)
    run.dies()
    run.judges("script-error")
    folder = write_history(tmp_path / "history", {"supervisor": run.events})
    text = "no step was trained yet, in 1 attempt and 2.5 s\n"
    ran = holdfast("cost", folder)
    assert (ran.code, ran.out) == (0, text)
    ran = holdfast("audit", folder)
    assert (ran.code, ran.out.count("unknown")) == (1, 2)  # the finding, and the verdict on the whole


def test_every_command_has_help_with_an_example(holdfast) -> None:  # type: ignore[no-untyped-def]
    for command in (
        ["demo"],
        ["report"],
        ["watch"],
        ["compare"],
        ["inspect"],
        ["verify"],
        ["lab", "list"],
        ["lab", "run"],
    ):
        ran = holdfast(*command, "--help")
        assert ran.code == 0
        assert "Example: holdfast" in " ".join(ran.out.split()), command


def test_the_version_is_printed_with_that_of_torch(holdfast) -> None:  # type: ignore[no-untyped-def]
    ran = holdfast("--version")
    assert ran.code == 0
    assert ran.out.startswith(f"holdfast {__version__}, torch {torch.__version__}, Python 3.")


def test_a_closed_pipe_is_no_traceback() -> None:
    command = f"{Path(sys.executable).parent / 'holdfast'} lab list | true"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert "Traceback" not in ended.stderr


def test_a_full_output_is_one_line() -> None:
    command = f"{Path(sys.executable).parent / 'holdfast'} lab list > /dev/full"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (
        2,
        "holdfast: the operating system reported: No space left on device.\n",
    )


def test_options_of_the_script_without_the_dashes_before_them_get_the_hint(holdfast, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ran = holdfast("run", "--workers", "2", "train.py", "--epochs", "3")
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert "own arguments after --: holdfast run --workers 2 train.py -- --epochs 3" in ran.err
    assert "own arguments after --: holdfast run train.py -- --lr=0.1" in holdfast("run", "train.py", "--lr=0.1").err
    for other in (("run", "--wrokers", "2", "train.py"), ("audit", "a.py", "--nothing")):
        assert "comes after" not in holdfast(*other).err


@pytest.mark.parametrize(("why", "code"), [(None, 0), ("the clock", 1)])
def test_a_rehearsal_says_what_it_found_and_exits_by_it(
    holdfast, why: str | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    from holdfast.rehearse import rehearsal
    from holdfast.rehearse.cause import Cause
    from holdfast.rehearse.report import Rehearsed

    found = Rehearsed(run="killed", steps=5, cause=Cause(word="unknown", why=why) if why else None)
    monkeypatch.setattr(rehearsal, "rehearse", lambda config, out, **how: found)
    ran = holdfast("rehearse", "--inject", "random=3,seed=7", "--out", tmp_path / "new", __file__, "--", "--epochs", 3)
    assert ran.code == code
    assert ran.out.startswith("resumes exactly" if why is None else "does not resume exactly: the clock")
    assert ran.out.endswith(f"runs: {tmp_path / 'new'}\n")
    assert "--inject random=3,seed=7" in ran.err


def test_links_in_a_circle_are_no_folder_of_a_run(holdfast, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for option in ("--out", "--checkpoints"):
        ran = holdfast("run", option, tmp_path / "loop", __file__)
        assert (ran.code, ran.err.count("\n")) == (2, 1), ran.err


def test_what_is_wrong_with_the_number_of_workers_is_said_before_torch_is_imported() -> None:
    code = (
        "import sys; from holdfast import cli; sys.argv = ['holdfast', 'run', '--workers', '0', __file__]\n"
        "try: cli.main()\nexcept SystemExit as end: assert end.code == 2\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code.replace("__file__", repr(__file__))], check=True, timeout=60)
