"""The audit of shards that came back with older values: each replacement declares possible sources, or it fails."""

from typing import Any

import pytest

from fake_live_runs import LOST_AT, FakeLiveRun, found
from fake_runs import digest
from holdfast.audit.run_record import RunRecord
from holdfast.audit.verdicts import Finding, audit, worst
from holdfast.events import Commit, Event, Reassembled, Regroup

GATHERED = {"origin": "gathered", "step": LOST_AT - 1, "rows": 3, "parameters": ["model/weight"]}
SAVED = {"origin": "snapshot", "step": LOST_AT - 2, "rows": 3, "parameters": ["optimizer/0"]}
LOST = 2


def partial_run(declared: Reassembled | None, strategy: str = "partial") -> FakeLiveRun:
    """Return a run whose member 2 is lost in a step and replaced, and declares its shard as given."""
    run = FakeLiveRun(strategy=strategy, how="before")
    run.says(0, Commit(1, LOST_AT - 2, 4096, 0.5, state=digest("saved")))
    regroup = Regroup(1, 2, run.reached, strategy, run.members, (LOST,), (), 0, 3)
    run.number = 2
    run.begins(LOST, run.reached, LOST, regroup)
    if declared:
        at = next(i for i, event in enumerate(run.files["rank-2"]) if event.what is regroup)
        run.files["rank-2"].insert(at + 1, Event(1.0, "rank-2", declared))
    for member in (0, 1, 3):
        run.says(member, regroup)
    return run.ends()


def finding(declared: Reassembled | None, strategy: str = "partial") -> Finding:
    return found(audit(partial_run(declared, strategy).events), "lost_workers_are_declared")


def reassembled(**fields: Any) -> Reassembled:
    whole = Reassembled(1, 2, LOST_AT + 1, parameters=(GATHERED,), moments=(SAVED,))
    return whole._replace(**fields)


def test_a_declared_shard_passes_and_is_described() -> None:
    run = partial_run(reassembled(rounded="bfloat16"))
    assert worst(audit(run.events)) == "pass"
    because = found(audit(run.events), "lost_workers_are_declared").because
    assert (
        "its shard from weights gathered in step 5 and the snapshot of step 4 (weights rounded to bfloat16)" in because
    )


def test_a_shard_of_unknown_origin_fails() -> None:
    assert finding(None).verdict == "fail"
    assert "does not declare where its shard is from" in finding(None).because


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({**SAVED, "step": LOST_AT - 3}, "the snapshot of step 3, which the run has not committed"),
        ({**GATHERED, "step": LOST_AT + 2}, "'gathered' of step 8, which cannot be known before step 7"),
        ({**GATHERED, "origin": "luck"}, "'luck' of step 5"),
        ({"origin": "snapshot"}, "'snapshot' of step None"),
    ],
)
def test_an_impossible_source_fails(source: dict[str, Any], text: str) -> None:
    assert finding(reassembled(moments=(source,))).verdict == "fail"
    assert text in finding(reassembled(moments=(source,))).because


def test_older_values_in_an_exact_recovery_fail() -> None:
    assert finding(None, "replay").verdict == "pass"
    assert "from older values, in a recovery by 'replay'" in finding(reassembled(), "replay").because


def test_steps_after_an_older_shard_need_not_agree_with_those_of_another_attempt() -> None:
    def keys(strategy: str) -> list[object]:
        declared = reassembled() if strategy == "partial" else None
        return [key for _, key in RunRecord(partial_run(declared, strategy).events).memberships(1).variations()]

    assert keys("replay") == [4] * len(keys("replay"))
    assert ("lossy", 1, LOST_AT + 1) in keys("partial")
