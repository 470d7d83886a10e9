"""The commands around a run: `holdfast run` trains through failures, `audit` proves it, `cost` says what it took."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import cli
from supervisor_process import SUPPORT, StartCommand

TASK = json.dumps({"epochs": 4})


class Command:
    """The command in this process, which has imported all that it needs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capfd = monkeypatch, capfd

    def __call__(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        self._monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
        self._capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), *self._capfd.readouterr())


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd)


@pytest.fixture(scope="module")
def out(start_command: StartCommand, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in which rank 1 was killed before step 12."""
    folder = tmp_path_factory.mktemp("commands") / "out"
    options = ["--workers", 2, "--save-every", 5, "--inject", "kill@12,rank=1"]
    ran = start_command("run", *options, "--out", folder, SUPPORT / "training_script.py", "--", TASK)
    assert ran.wait() == 0, ran.stderr
    assert "completed after 2 attempts" in ran.stdout
    return folder


def test_the_audit_passes_by_its_exit_status_and_says_what_it_checked(out: Path, here: Command) -> None:
    ran = here("audit", out)
    assert (ran.returncode, ran.stdout.splitlines()[-1]) == (0, "audit: pass")
    assert "every sample trained once" in ran.stdout


def test_a_history_with_a_window_taken_out_does_not_pass(out: Path, tmp_path: Path, here: Command) -> None:
    for file in (out / "history").iterdir():
        lines = [line for line in file.read_text().splitlines() if '"step": 7,' not in line]
        (tmp_path / file.name).write_text("\n".join(lines) + "\n")
    ran = here("audit", tmp_path)
    assert ran.returncode == 1
    assert "audit: fail" in ran.stdout


def test_the_cost_of_a_run_adds_up(out: Path, tmp_path: Path, here: Command) -> None:
    told = json.loads(here("cost", out, "--json").stdout)[str(out)]
    assert told["restarts"] == 1
    assert told["rework"]["steps"] == 2
    assert sum(told["seconds"].values()) == pytest.approx(told["wall"])
    shown = here("cost", out, "--figure", tmp_path / "cost.png")
    assert "goodput:" in shown.stdout
    assert "killed" in shown.stdout or "signal" in shown.stdout
    assert (tmp_path / "cost.png").stat().st_size > 0


def test_the_advice_rests_on_the_restart_that_was_seen(out: Path, here: Command) -> None:
    told = json.loads(here("advise", out, "--mtbf", "1h", "--json").stdout)
    assert told["costs"]["restart"]["basis"] == "measured in this run"
    assert told["save_every"] > 5  # a failure an hour is no reason to save 20 times a second
    assert told["prices"]["restart"]["iterations"]["high"] >= 5  # those since the last save, and while it was written
    assert here("advise", out).stdout.startswith("advice: --recovery ")


def test_the_killed_run_has_the_bits_of_an_undisturbed_run(
    out: Path, start_command: StartCommand, tmp_path: Path, here: Command
) -> None:
    script = SUPPORT / "training_script.py"
    task = json.dumps({"epochs": 4, "dropout": 0.2})
    runs = {"undisturbed": TASK, "other": task}
    commands = [
        start_command("run", "--workers", 2, "--save-every", 5, "--out", tmp_path / name, script, "--", arguments)
        for name, arguments in runs.items()
    ]
    for command in commands:
        assert command.wait() == 0, command.stderr
    equal = here("compare", tmp_path / "undisturbed", out)
    assert (equal.returncode, equal.stdout.splitlines()[2].split(":")[0]) == (0, "equal")
    different = here("compare", tmp_path / "other", out)
    assert different.returncode == 1
    assert "model/" in different.stdout


def test_several_runs_are_compared_side_by_side(out: Path, here: Command) -> None:
    ran = here("cost", out, out / "history")
    assert ran.returncode == 0
    assert "stall" in ran.stdout


def test_a_folder_that_holds_another_run_is_refused_in_one_line(start_command: StartCommand, out: Path) -> None:
    task = json.dumps({"epochs": 5})
    ran = start_command("run", "--workers", 2, "--out", out, SUPPORT / "training_script.py", "--", task)
    assert ran.wait() == 2
    assert len(ran.stderr.strip().splitlines()) == 1
    assert "argument 1 was" in ran.stderr
