"""Runs with staleness: the audit accounts for every push, whichever member is lost."""

from pathlib import Path

import numpy as np
import pytest

from holdfast import events
from holdfast.audit.verdicts import audit, worst
from holdfast.history.log import read_history
from holdfast.server.members import Member
from server_in_process import run_in_process
from server_runs import settings, told

ALL_OF_TWO_ITERATIONS = 2 * 6 * 2 * 3  # of 6 rounds, from 2 parts, to 3 nodes


def assert_audited(out: Path) -> None:
    findings = audit(read_history(out).events)

    assert worst(findings) == "pass", [finding for finding in findings if finding.verdict != "pass"]


def test_iterations_that_a_lost_controller_did_not_record_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes had applied the last push, but the loss after it was not measured."""
    applied, struck = 0, False

    def kill(count: int, member: Member, method: str) -> Member | None:
        nonlocal applied, struck
        applied += method == "apply"
        if struck or method == "apply" or applied < ALL_OF_TWO_ITERATIONS:
            return None
        struck = True
        return Member("controller", 0)

    run_in_process(monkeypatch, settings(tmp_path, staleness=2, iterations=5), kill)

    assert struck
    assert [event.iteration for event in told(tmp_path, events.Iterate)] == [0, 1, 2, 3, 4]
    assert_audited(tmp_path)


@pytest.mark.parametrize("seed", range(10))
def test_several_may_be_lost_with_staleness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = rng.choice(["node", "worker", "controller"], 3)
    strikes = {
        int(at): Member(str(kind), int(number))
        for at, kind, number in zip(rng.integers(1, 178, 3), kinds, rng.integers(0, 3, 3), strict=True)
    }
    recovery = ["partial", "full"][seed % 2]
    chosen = settings(tmp_path, workload="mf-generated", staleness=1 + seed % 3, recovery=recovery)

    run_in_process(
        monkeypatch,
        chosen,
        lambda count, *_: strikes.get(count),
        lambda count: Member("node", 3) if count == 80 else None,
    )

    assert_audited(tmp_path)


def test_blocks_of_one_push_that_were_moved_and_lost_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of what node 0 applied went to the node that joined, the rest was lost with it and applied again."""
    strikes = {44: Member("controller", 0), 79: Member("node", 0), 168: Member("controller", 0)}
    run_in_process(
        monkeypatch,
        settings(tmp_path, workload="mf-generated", staleness=2),
        lambda count, *_: strikes.get(count),
        lambda count: Member("node", 3) if count == 34 else None,
    )

    findings = {finding.check: finding for finding in audit(read_history(tmp_path).events) if finding.verdict != "pass"}
    assert set(findings) == {"every_push_is_applied_once"}
    assert findings["every_push_is_applied_once"].verdict == "unknown"
    assert "the history does not record which" in findings["every_push_is_applied_once"].because
