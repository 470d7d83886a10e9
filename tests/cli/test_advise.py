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


def test_the_advice_comes_first_then_assumptions_prices_and_reasons(run: Path) -> None:
    lines = advised(run, "--mtbf", "4h").splitlines()
    assert lines[0].startswith("advice: --recovery ")
    for recovery in ("restart", "replay", "forward", "skip"):
        assert any(line.split()[:1] == [recovery] for line in lines)
    assert any("every 4 h (given)." in line for line in lines)
    assert lines[1] == "Assumed, because this history does not show it:"


def test_files_are_written_where_they_are_asked_for(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "advice"
    asked = ("--mtbf", "4h", "--workers", 64)
    advised(run, *asked, "--out", out)
    assert {path.name for path in out.iterdir()} == {"advice.json", "advice.png", "advice.pdf"}
    numbers = json.loads((out / "advice.json").read_text())
    assert numbers == json.loads(advised(run, *asked, "--json"))
    assert numbers["prices"]["restart"]["seconds"]["low"] < numbers["prices"]["restart"]["seconds"]["high"]


def test_a_large_job_is_simulated_beside_those_that_were_published(run: Path) -> None:
    shown = advised(run, "--workers", 16384, "--mtbf-per-worker", "5.8y", "--restart", "10m")
    assert "The same job with 16384 workers, simulated. Assumptions:" in shown
    assert "Assumptions:" in shown
    assert "Llama 3" in shown


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
    ],
)
def test_what_cannot_be_asked_is_one_line(run: Path, arguments: list[str], says: str) -> None:
    with pytest.raises(HoldfastError, match=says) as refusal:
        CliRunner().invoke(app, ["advise", str(run), *arguments], catch_exceptions=False)
    assert "\n" not in str(refusal.value)


def test_a_folder_without_a_history_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match="there is no history"):
        CliRunner().invoke(app, ["advise", str(tmp_path)], catch_exceptions=False)
