"""Claims hold or are shown as failing, and results are written for people and for programs."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from holdfast.errors import BadInput, StorageFailed
from holdfast.lab import result_page
from holdfast.lab.bounds import perturbations
from holdfast.lab.bounds.cost_bound import PerturbedTrials, within_claim
from holdfast.lab.experiment import Options, Progress, chosen
from holdfast.lab.introductions import introduction
from holdfast.lab.partial import partial_recovery
from holdfast.lab.registry import EXPERIMENTS
from holdfast.lab.result import Claim, Result, ResultTable, command_line, environment
from holdfast.report.files import prepare, replace_text
from holdfast.theory.rate import Rate
from repository import ROOT

RESULTS = ROOT / "docs" / "results" / "README.md"
QUICK = Options(quick=True, trials=20)


def silent(label: str, total: int) -> Progress:
    return lambda done: None


def claim(low: float | None, high: float | None, measured: float) -> Claim:
    return Claim(id="a", claim="b", source="c", expected=(low, high), measured=measured)


@pytest.mark.parametrize(
    ("low", "high", "measured", "holds"),
    [(1, 2, 1.5, True), (1, 2, 1, True), (1, 2, 2.1, False), (None, 2, -9, True), (1, None, 0.9, False), (None, None, math.nan, False)],
)  # fmt: skip
def test_a_claim_holds_inside_its_range_and_never_without_a_number(
    low: float | None, high: float | None, measured: float, holds: bool
) -> None:
    assert claim(low, high, measured).holds is holds


def test_a_result_without_claims_does_not_hold() -> None:
    assert not Result(experiment="e", config={}, rows=[], claims=[]).holds


def test_a_cost_exceeds_the_bound_only_by_more_than_one_iteration() -> None:
    rate = Rate(c=0.5, distance=1.0)  # a perturbation of size 3 at step 0: log2(4) = 2 iterations
    sizes, at = np.array([[3.0], [3.0], [3.0]]), np.array([0])
    measured = PerturbedTrials("kind", sizes, at, np.array([2.0, 3.0, 4.0]))
    assert measured.bounds(rate) == pytest.approx([2, 2, 2])
    assert measured.within(rate) == pytest.approx(2 / 3)
    assert "without rounding 0.333" in within_claim(measured, rate, "", 1).claim
    assert PerturbedTrials("kind", sizes, at, np.array([np.inf, 0, 0])).within(rate) == pytest.approx(2 / 3)


def test_a_claim_that_fails_is_marked_in_every_file(tmp_path: Path) -> None:
    result = Result(
        experiment="e", config={"seed": 1}, rows=[{"cost": math.inf}], claims=[claim(1, 2, 3), claim(3, 3, 3)]
    )
    page = result_page.write(result, tmp_path).read_text()
    assert "DOES NOT HOLD" in page
    assert "1 of 2 claims hold" in page
    assert "| DOES NOT HOLD | b (c) | 1 to 2 | 3 |" in (tmp_path / "summary.md").read_text()
    written = json.loads((tmp_path / "result.json").read_text())
    assert [c["holds"] for c in written["claims"]] == [False, True]
    assert written["rows"] == [{"cost": None}]
    names = {
        "experiment",
        "command",
        "date",
        "config",
        "environment",
        "remarks",
        "claims",
        "tables",
        "captions",
        "terms",
        "rows",
    }
    assert set(written) == names


def test_numbers_that_json_lacks_are_written_as_null() -> None:
    table = ResultTable("costs", ["policy", "cost"], [["full", math.inf], ["priority", 2.5]])
    result = Result(experiment="e", config={}, rows=[], claims=[], tables=[table], captions={"f": "What f shows."})
    written = json.loads(json.dumps(result.to_json()))
    assert written["tables"] == [
        {"title": "costs", "columns": ["policy", "cost"], "rows": [["full", None], ["priority", 2.5]]}
    ]
    assert written["captions"] == {"f": "What f shows."}


def test_a_result_that_is_read_again_still_explains_its_words(tmp_path: Path) -> None:
    words = {"`early saves`": "parts of the blocks are saved early."}
    result_page.write(Result(experiment="e", config={}, rows=[], claims=[], terms=words), tmp_path)
    assert dict(result_page.read(tmp_path).terms) == words


def test_the_stored_command_shows_only_the_last_name_of_an_absolute_path() -> None:
    typed = ["lab", "run", "qp-bound", "--data", "/home/someone/data", "--out", "my results"]
    assert command_line(typed) == "holdfast lab run qp-bound --data …/data --out 'my results'"


def test_markup_in_a_claim_is_escaped(tmp_path: Path) -> None:
    odd = Claim(id="a", claim="<script>alert(1)</script>", source="c", expected=(0, 1), measured=0)
    page = result_page.write(Result(experiment="e", config={}, rows=[], claims=[odd]), tmp_path).read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_qp_bound_holds_and_writes_all_files(tmp_path: Path) -> None:
    result = perturbations.run_qp(QUICK, silent)
    assert result.holds
    assert {row["kind"] for row in result.rows} == {"one perturbation", "many perturbations", "adversarial"}
    result_page.write(result, tmp_path)
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    pages = ["report.html", "result.json", "summary.md"]
    assert written == ["figures/qp-bound.pdf", "figures/qp-bound.png", *pages, "tables/every-row.csv"]


def test_the_same_seed_gives_the_same_rows_and_another_seed_does_not() -> None:
    rows = [perturbations.run_qp(Options(quick=True, trials=5, seed=seed), silent).rows for seed in (1, 1, 2)]
    assert rows[0] == rows[1]
    assert rows[0] != rows[2]


def test_one_and_two_jobs_give_the_same_rows_of_logistic_regression() -> None:
    one, two = (perturbations.run_bound(Options(quick=True, trials=6, jobs=jobs), silent) for jobs in (1, 2))
    assert one.rows == two.rows
    assert one.holds


def test_resets_lie_between_random_and_adversarial_perturbations() -> None:
    result = perturbations.run_reset(QUICK, silent)
    assert [c.id for c in result.claims if not c.holds] == []
    kinds = [row["kind"] for row in result.rows]
    assert kinds == ["reset"] * 20 + ["random"] * 20 + ["adversarial"] * 20


def test_partial_recovery_costs_less_than_full_unless_all_is_lost(tmp_path: Path) -> None:
    options = Options(quick=True, trials=20, panels=("mlr-mnist",), out=tmp_path)
    rows = partial_recovery.run(options, silent).rows
    saved = {row["lost"]: row["reduction"] for row in rows if row["recovery"] == "partial"}
    assert saved["1/4"] > saved["1/2"] > saved["3/4"] > saved["1"] == 0


def test_every_experiment_has_a_name_a_title_and_a_source() -> None:
    assert list(EXPERIMENTS) == [
        "qp-bound",
        "mlr-bound",
        "mlr-reset",
        "lda-reset",
        "partial-recovery",
        "priority-checkpoint",
        "early-failures",
        "backprop-tradeoff",
        "server-overhead",
        "advice-check",
        "recovery-matrix",
        "sharded-tradeoff",
    ]
    assert all(entry.title and entry.source for entry in EXPERIMENTS.values())
    with pytest.raises(BadInput, match="no experiment 'nope'; choose among qp-bound"):
        chosen(["nope"], EXPERIMENTS, "experiment")


@pytest.mark.parametrize("bad", [{"trials": 0}, {"jobs": 0}, {"seed": -1}])
def test_options_out_of_range_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(BadInput):
        Options(**bad)  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BadInput, match="is a file"):
        prepare(tmp_path / "file")
    with pytest.raises(StorageFailed, match="cannot write"):
        prepare(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_leaves_the_old_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    replace_text(tmp_path / "result.json", "old")
    monkeypatch.setattr("holdfast.report.files.write_atomically", full)
    with pytest.raises(StorageFailed, match="No space left"):
        replace_text(tmp_path / "result.json", "new")
    assert (tmp_path / "result.json").read_text() == "old"


def test_an_interval_that_covers_the_whole_expected_range_leaves_the_claim_unresolved() -> None:
    wide = Claim("a", "b", "c", (0.78, 0.95), 0.731, (0.54, 1.01))
    assert (wide.holds, wide.resolved, result_page.verdict(wide)) == (False, False, "not resolved")
    assert Result(experiment="e", config={}, rows=[], claims=[wide]).holds  # so the command ends with status 0


def test_an_unknown_interval_leaves_the_claim_unresolved_unless_nothing_was_measured() -> None:
    unknown = (math.nan, math.nan)
    assert result_page.verdict(Claim("a", "b", "c", (0, 1), 0.5, unknown)) == "not resolved"
    assert result_page.verdict(Claim("a", "b", "c", (0, 1), 1.5, unknown)) == "not resolved"
    assert result_page.verdict(Claim("a", "b", "c", (0, 1), math.nan, unknown)) == "DOES NOT HOLD"
    assert "interval unknown" in result_page.measured(Claim("a", "b", "c", (0, 1), 0.5, unknown))


PUBLISHED = sorted((ROOT / "docs" / "results").glob("*/result.json"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parent.name)
def test_the_verdicts_of_a_published_result_follow_from_its_numbers(path: Path) -> None:
    data = json.loads(path.read_text())
    summary = (path.parent / "summary.md").read_text()
    counts = dict.fromkeys(("holds", "not resolved", "DOES NOT HOLD"), 0)
    for stored in data["claims"]:
        ends = stored.get("interval")
        interval = None if ends is None else tuple(math.nan if end is None else end for end in ends)
        claim = Claim(stored["id"], stored["claim"], "", tuple(stored["expected"]), stored["measured"], interval)
        assert (claim.holds, claim.resolved) == (stored["holds"], stored["resolved"]), stored["id"]
        counts[result_page.verdict(claim)] += 1
    assert {word: summary.count(f"| {word} |") for word in counts} == counts
    (line,) = re.findall(rf"^\|[^\n]*\({path.parent.name}/summary.md\).*$", RESULTS.read_text(), flags=re.M)
    shown = f"| {counts['holds']} of {sum(counts.values())} | {counts['not resolved']} | {counts['DOES NOT HOLD']} |"
    assert line.endswith(shown)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_report_begins_with_what_the_experiment_does(name: str) -> None:
    page = result_page.page(
        Result(experiment=name, config={"seed": 3, "trials": 4}, rows=[], claims=[Claim("a", "b", "c", (0, 1), 0.5)]),
        [],
        environment(),
    )
    about = introduction(name)
    assert about.text
    assert page.lead.startswith(about.text)
    assert page.terms == {**about.terms, result_page.CLAIM: result_page.CLAIMS}
    assert page.facts["Settings"] == "seed: 3; trials: 4"
