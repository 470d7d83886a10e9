"""Nodes join a run: the history accounts for every block, whichever member is lost meanwhile."""

from pathlib import Path

import numpy as np
import pytest

from holdfast import events
from holdfast.audit.verdicts import audit, worst
from holdfast.blocks.recoveries import RECOVERIES
from holdfast.history.log import read_history
from holdfast.server.members import Member
from holdfast.server.server_node import ServerNode
from holdfast.server.shard import BlocksMoved
from holdfast.workloads.divided import Push, RoundId
from server_in_process import run_in_process
from server_runs import QUARTERS, settings, told

COMES = 66  # the call at which a fourth node arrives: it joins when the iteration is done


def assert_audited(out: Path) -> None:
    findings = audit(read_history(out).events)

    assert worst(findings) == "pass", [finding for finding in findings if finding.verdict != "pass"]


@pytest.mark.parametrize("recovery", RECOVERIES)
@pytest.mark.parametrize("method", ["give", "adopt", "hold"])
@pytest.mark.parametrize("victim", ["the new node", "node 0", "the controller"])
def test_anybody_may_be_lost_while_a_node_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, method: str, recovery: str
) -> None:
    struck: list[Member] = []
    who = {"the new node": Member("node", 3), "node 0": Member("node", 0), "the controller": Member("controller", 0)}

    def kill(count: int, member: Member, called: str) -> Member | None:
        if called != method or struck:
            return None
        struck.append(who[victim])
        return who[victim]

    chosen = settings(tmp_path, workload="mf-generated", iterations=3, recovery=recovery)
    run_in_process(monkeypatch, chosen, kill, lambda count: Member("node", 3) if count == COMES else None)

    assert struck
    assert [event.number for event in told(tmp_path, events.Joined)] == [3]
    assert_audited(tmp_path)


@pytest.mark.parametrize("seed", [4, 6, 8, 10, 12, 13, 15, 21, 64, 66, 199])
def test_several_may_be_lost_about_the_time_a_node_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    comes = int(rng.integers(20, 160))
    strikes = {
        comes + int(after): Member(str(kind), int(number))
        for after, kind, number in zip(
            rng.integers(0, 60, 3),
            rng.choice(["node", "node", "worker", "controller"], 3),
            rng.integers(0, 4, 3),
            strict=True,
        )
    }
    chosen = settings(tmp_path, workload="mf-generated", iterations=4, recovery=["partial", "full"][seed % 2])

    run_in_process(
        monkeypatch,
        chosen,
        lambda count, *_: strikes.get(count),
        lambda count: Member("node", 3) if count == comes else None,
    )

    assert_audited(tmp_path)


def test_the_loss_of_a_node_without_blocks_takes_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = settings(tmp_path, workload="mf-generated", iterations=3, recovery="full")
    run_in_process(
        monkeypatch,
        chosen,
        lambda count, member, method: member if method == "adopt" else None,
        lambda count: Member("node", 3) if count == COMES else None,
    )

    assert not told(tmp_path, events.Restored)


def test_a_node_that_gives_blocks_away_no_longer_changes_them(tmp_path: Path) -> None:
    """With staleness workers push meanwhile: what came after the copy was made would be lost with it."""
    node = ServerNode(0, settings(tmp_path, policy=QUARTERS))
    node.begin(np.arange(64), 0)
    ids = np.arange(3)
    values = {name: np.zeros_like(array) for name, array in node.pull(0, ids)[0].items()}
    node.give(1, ids)

    with pytest.raises(BlocksMoved):
        node.apply(0, RoundId(0, 0, 0), 0, Push(ids, values))
    node.close()
