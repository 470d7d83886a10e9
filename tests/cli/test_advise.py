"""`holdfast advise`: the advice on stdout, files where they are asked for, and one line where something is wrong."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fake_histories import calm, write_history
from fake_server_histories import contracting, told
from holdfast.cli import app
from holdfast.errors import HoldfastError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run in which nothing failed."""
    events = calm().events
    files = {who: [event for event in events if event.who == who] for who in {event.who for event in events}}
    return write_history(tmp_path / "run" / "history", files).parent


def advised(*arguments: object) -> str:
    """Return the output of the command."""
    ran = CliRunner().invoke(app, ["advise", *map(str, arguments)], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return ran.output


def test_the_advice_comes_first_then_its_figures_and_assumptions(run: Path) -> None:
    lines = advised(run, "--mtbf", "4h").splitlines()
    assert lines[0].startswith("advice: --recovery ")
    assert "of the wall clock trains" in lines[1]
    assert lines[2] == "- A failure is expected every 4 h (given)."
    assert lines[5] == "Assumed, because neither the history nor an option says it:"


def test_explain_adds_the_cost_under_each_recovery(run: Path) -> None:
    short, long = (advised(run, "--mtbf", "4h", *more).splitlines() for more in ((), ("--explain",)))
    assert long[: len(short) - 1] == short[:-1]
    for recovery in ("restart", "replay", "forward", "skip"):
        assert not any(line.split()[:1] == [recovery] for line in short)
        assert any(line.split()[:1] == [recovery] for line in long)


LARGE = ("--workers", 256, "--nodes", 32, "--mtbf-per-node", "10d", "--step", "3s", "--restart", "3m", "--stall", "1s")


def test_a_large_job_is_answered_in_15_lines_at_most(run: Path) -> None:
    shown = advised(run, *LARGE, "--parameters", "7B", "--storage", "5GB").splitlines()
    assert len(shown) <= 15
    assert shown[0].startswith("advice: --recovery restart --save-every ")
    assert "every 7.5 h (given: 10 d for each of 32 nodes). It takes 1/32 of the workers;" in shown[2]
    assert "is durable after 17 s (given: 84 GB at 5 GB/s)" in shown[5]
    assert any("over NCCL (assumed for a job larger than a node)" in line for line in shown)


def test_files_are_written_where_they_are_asked_for(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "advice"
    asked = ("--mtbf", "4h", "--workers", 64)
    advised(run, *asked, "--out", out)
    assert {path.name for path in out.iterdir()} == {"advice.json", "advice.png", "advice.pdf"}
    numbers = json.loads((out / "advice.json").read_text())
    assert numbers == json.loads(advised(run, *asked, "--json"))
    assert numbers["prices"]["restart"]["seconds"]["low"] < numbers["prices"]["restart"]["seconds"]["high"]


def test_a_large_job_is_simulated_beside_those_that_were_published(run: Path) -> None:
    asked = ("--workers", 16384, "--mtbf-per-worker", "5.8y", "--restart", "10m")
    shown = advised(run, *asked, "--explain")
    assert "The same job with 16384 workers, simulated:" in shown
    assert "Llama 3" in shown
    assert "Llama 3" not in advised(run, *asked)


def test_a_served_run_is_advised_too(tmp_path: Path) -> None:
    folder = write_history(tmp_path / "served" / "history", {"controller": told(*contracting())}).parent
    shown = advised(folder, "--mtbf", "1h", "--workers-lost", "1/2", "--out", tmp_path / "out")
    assert shown.startswith("advice: --restore partial --interval ")
    assert (tmp_path / "out" / "advice.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mtbf", "4x"], "--mtbf '4x' is not a duration"),
        (["--for", "soon"], "--for 'soon' is not a duration"),
        (["--workers-lost", "9/8"], "--workers-lost must be above 0 and at most 1"),
        (["--workers", "0"], "--workers must be 1 or more"),
        (["--mtbf", "1h", "--mtbf-per-worker", "1h"], "give one of them"),
        (["--mtbf-per-node", "1d"], "--mtbf-per-node needs the number of nodes: give --nodes too"),
        (["--backend", "mpi"], "--backend must be gloo or nccl"),
    ],
)
def test_what_cannot_be_asked_is_one_line(run: Path, arguments: list[str], says: str) -> None:
    with pytest.raises(HoldfastError, match=says) as refusal:
        CliRunner().invoke(app, ["advise", str(run), *arguments], catch_exceptions=False)
    assert "\n" not in str(refusal.value)


def test_a_folder_without_a_history_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match="there is no history"):
        CliRunner().invoke(app, ["advise", str(tmp_path)], catch_exceptions=False)
