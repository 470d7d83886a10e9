"""Whether the audit can be fooled about what a run, or an attempt of it, began with; and true beginnings."""

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from fake_histories import write_history
from fake_live_runs import FakeLiveRun
from fake_runs import changed, digest, is_a
from fake_two_ranks import TwoRankRun, by, found
from holdfast import cli
from holdfast.audit.verdicts import audit, worst
from holdfast.events import Attempt, Commit, Event, Judged, Launch, Open, Recover, Save
from holdfast.runs.config import RunConfig, WeightsSource
from holdfast.runs.histories import RunFacts
from holdfast.stall import Stall

MINE, OTHER = digest("weights"), digest("other weights")


class TestARunWithWeightsOfAnother:
    def told(self, weights: str | None, by_supervisor: str | None) -> TwoRankRun:
        run = TwoRankRun().trains(1, None, 17, weights=weights).stops(1, 17)
        return run.supervisor(Open(2), Launch(1, 2, ("train.py",), weights=by_supervisor), Judged("completed", 1, ""))

    def found(self, run: TwoRankRun, weights: str | None, is_known: bool = True) -> tuple[str, str]:
        return found(audit(run.events, RunFacts(weights=weights) if is_known else None), "restored_states_agree")

    def test_weights_that_only_run_json_names_fail(self) -> None:
        assert self.found(self.told(None, None), MINE) == (
            "fail",
            f"the initial weights are the weights {MINE[:12]} by run.json, but those of the script by supervisor",
        )

    def test_weights_that_run_json_does_not_name_fail(self) -> None:
        assert self.found(self.told(MINE, MINE), None)[0] == "fail"
        assert self.found(self.told(MINE, MINE), OTHER)[0] == "fail"

    def test_weights_that_all_name_pass(self) -> None:
        assert self.found(self.told(MINE, MINE), MINE)[0] == "pass"
        assert self.found(self.told(None, None), None)[0] == "pass"

    def test_weights_pass_without_run_json(self) -> None:
        assert self.found(self.told(MINE, MINE), None, is_known=False)[0] == "pass"

    @pytest.mark.parametrize(("digest", "code"), [(MINE, 0), (OTHER, 1)])
    def test_is_compared_with_run_json_by_the_command(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digest: str, code: int
    ) -> None:
        folder_of(self.told(MINE, MINE), tmp_path)
        config = RunConfig(script="train.py", source=WeightsSource(place="w.safetensors", digest=digest))
        (tmp_path / "run.json").write_text(json.dumps(config.to_json()))
        monkeypatch.setattr(sys, "argv", ["holdfast", "audit", str(tmp_path)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == code


def test_a_snapshot_of_step_0_may_be_found_again_after_an_attempt_with_fewer_ranks() -> None:
    run, state = TwoRankRun().trains(1, None, 0), digest("saved", 0)  # saves, and dies before it can record that
    run.says(0, Open(2), Attempt(2, 1, 0, 7), Commit(2, 0, 4096, found=True, state=state))
    run.says(0, Recover(2, 0, 0, 0, "keyed", 0.0, state=state))
    run.trains(3, 0, 17)
    place = next(i for i, event in enumerate(run.events) if isinstance(event.what, Recover) and event.what.attempt == 3)
    run.events[place:place] = by("rank-0", Commit(3, 0, 4096, found=True, state=state))  # its node has another history
    run.stops(3, 17)
    assert run.found("generators_restored")[0] == "pass"


class TestTheSeedOfARun:
    def run(self, *seeds: int | None) -> TwoRankRun:
        """Killed before anything was trained, then after step 10 was saved, and then stopped."""
        first, second, third = seeds
        run = TwoRankRun()
        for rank in range(2):
            run.says(rank, Open(2), Attempt(1, 2, rank, 7, first))
        run.trains(2, None, 12, seed=second).saves(2, 10).trains(3, 10, 17, seed=third)
        return run.stops(3, 17)

    def test_is_one_from_the_first_thing_on_that_was_trained(self) -> None:
        assert self.run(5, 6, 7).found("one_plan") == (
            "fail",
            "rank-0 began attempt 3 with the seed 7, but attempt 2 trained with 6",
        )
        only_one = changed(
            self.run(5, 6, 6).events,
            is_a(Attempt, "rank-1", attempt=3),
            seed=7,
        )
        run = TwoRankRun()
        run.events = only_one
        assert run.found("one_plan")[0] == "fail"

    @pytest.mark.parametrize("seeds", [(5, 5, 5), (5, 6, 6), (None, None, None), (None, 6, None)])
    def test_may_be_another_before_that(self, seeds: Sequence[int | None]) -> None:
        assert self.run(*seeds).verdict() == "pass"


def test_ranks_may_begin_with_other_parameters_where_nothing_came_back() -> None:
    """Those of a protected average that was made before `run.replicate`, and is a copy of the model after one step."""
    run = FakeLiveRun(2).ends()
    begun = run.with_other(
        lambda who, what: who == "rank-1" and isinstance(what, Recover), fingerprint=digest("its own") + digest(1)
    )
    assert worst(audit(begun)) == "pass"


def folder_of(run: TwoRankRun, folder: Path) -> Path:
    files: defaultdict[str, list[Event]] = defaultdict(list)
    for event in run.events:
        files[event.who].append(event)
    return write_history(folder / "history", files)


def test_a_commit_follows_its_save_where_saves_are_recorded() -> None:
    run = TwoRankRun().trains(1, None, 12)
    run.says(0, *(Save(1, step, "overlapped", 4096, Stall(waited=0.5)) for step in (5, 10)))
    run.saves(1, 5).saves(1, 10)
    assert run.found("every_start_is_an_attempt")[0] == "pass"
    run.saves(1, 11)
    assert run.found("every_start_is_an_attempt") == (
        "fail",
        "rank-0 committed step 11 in attempt 1 without a save event of it",
    )


def test_a_found_commit_needs_no_save_event() -> None:
    run = TwoRankRun().trains(1, None, 12).trains(2, 10, 17)
    at = next(i for i, each in enumerate(run.events) if isinstance(each.what, Recover) and each.what.attempt == 2)
    run.events[at:at] = by("rank-0", Commit(2, 10, 4096, found=True, state=digest("saved", 10)))
    run.says(0, Save(2, 17, "overlapped", 4096, Stall(waited=0.5)))
    assert run.stops(2, 17).verdict() == "pass"


def test_a_commit_with_the_state_of_another_step_fails_if_the_parameters_have_changed_since() -> None:
    run = TwoRankRun().trains(1, None, 12).saves(1, 5).saves(1, 10).trains(2, 10, 17).stops(2, 17)
    assert run.found("restored_states_agree")[0] == "pass"
    run.events = changed(run.events, is_a(Commit, step=5), state=digest("saved", 10))
    assert run.found("restored_states_agree") == (
        "fail",
        "the snapshots of step 5 (attempt 1) and step 10 (attempt 1) have one digest, but the parameters changed "
        "between them",
    )


def test_commits_with_one_state_fail_also_if_the_first_of_them_is_of_step_0() -> None:
    run = TwoRankRun().trains(1, None, 12).saves(1, 0).saves(1, 5).saves(1, 10).trains(2, 10, 17).stops(2, 17)
    assert run.found("restored_states_agree")[0] == "pass"
    run.events = changed(
        run.events, lambda each: isinstance(each.what, Commit) and each.what.step <= 10, state=digest("saved", 10)
    )
    verdict, because = run.found("restored_states_agree")
    assert (verdict, because.startswith("the snapshots of step 5 (attempt 1) and step 10")) == ("fail", True)


def test_commits_of_states_that_never_change_are_alike() -> None:
    run = TwoRankRun().trains(1, None, 12)
    run.events = [
        each._replace(what=each.what._replace(state="0" * 32)) if each.kind == "step" else each for each in run.events
    ]
    run.events += by("rank-0", Commit(1, 5, 4096, 0.5, state="a"), Commit(1, 10, 4096, 0.5, state="a"))
    assert run.found("restored_states_agree")[0] == "pass"
