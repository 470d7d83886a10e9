"""The audit of one node's folder, where the histories of other nodes are merely absent."""

import pytest

from fake_runs import PLAN, changed, is_a
from fake_two_ranks import TwoRankRun, by
from holdfast.audit.verdicts import audit, worst
from holdfast.events import Done, Event, Judged, Launch, Open, Restart

END = PLAN.steps


def two_nodes() -> dict[int, list[Event]]:
    """Return the events of a run of two nodes with one rank each that was restarted once, by node.

    Rank 0 is on node 0 at first; after node 0 was lost and came back, it is on node 1."""
    run = TwoRankRun().trains(1, None, 7).saves(1, 4).trains(2, 4, END).saves(2, END)
    for rank in (0, 1):
        run.says(rank, Done(2, END))
    nodes: dict[int, list[Event]] = {0: [], 1: []}
    attempts = dict.fromkeys(nodes, 0)
    for event in run.events:
        rank = int(event.who.removeprefix("rank-"))
        attempts[rank] += isinstance(event.what, Open)
        nodes[rank if attempts[rank] == 1 else 1 - rank].append(event._replace(time=float(attempts[rank])))
    for node, events in nodes.items():
        launch = Launch(attempt=1, workers=1, argv=("train.py",), nodes=2)
        verdict = Judged("completed", 2, "all workers have finished")
        events += by(f"supervisor-{node}", Open(2), launch, Restart(2, 1), verdict)
    return nodes


def test_the_histories_of_both_nodes_pass() -> None:
    nodes = two_nodes()
    findings = audit(sorted([*nodes[0], *nodes[1]], key=lambda event: event.time))
    assert worst(findings) == "pass", findings


@pytest.mark.parametrize("node", [0, 1])
def test_the_history_of_one_node_is_unknown_and_says_what_to_bring(node: int) -> None:
    findings = audit(two_nodes()[node])
    assert worst(findings) == "unknown", findings
    unknown = [finding.because for finding in findings if finding.verdict == "unknown"]
    assert any(f"of node {1 - node} is absent: name its folder with --node-folder" in because for because in unknown)


def test_what_a_node_sent_before_it_was_lost_leaves_the_rest_unknown() -> None:
    nodes = two_nodes()
    sent = [event for event in nodes[0] if event.who == "supervisor-0"][:2]  # it had sent no steps
    findings = audit([*sent, *nodes[1]])
    assert worst(findings) == "unknown", findings
    unknown = [finding.because for finding in findings if finding.verdict == "unknown"]
    assert any("rank-0 of attempt 1" in because and "--node-folder" in because for because in unknown), unknown


def test_an_error_within_one_nodes_history_is_still_an_error() -> None:
    nodes = two_nodes()
    events = [event for event in nodes[0] if event.kind != "open"]
    assert worst(audit(events)) == "fail"


def test_a_history_that_claims_an_absurd_number_of_nodes_is_audited_at_once() -> None:
    events = changed(two_nodes()[0], is_a(Launch), nodes=1 << 62)
    unknown = [finding.because for finding in audit(events) if finding.verdict == "unknown"]
    assert any("the history of nodes 1, 2, 3, ... is absent" in because for because in unknown), unknown
