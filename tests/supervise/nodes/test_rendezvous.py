"""What a node that keeps the store of the workers needs from its machine."""

import resource

import pytest

from holdfast.supervise.nodes.rendezvous import RoundInfo, allow_connections


@pytest.mark.parametrize(
    ("workers", "limits", "expected"),
    [(4, (1024, 4096), 1024), (512, (1024, 4096), 3584), (1024, (1024, 4096), 4096), (16, (-1, -1), -1)],
)
def test_a_node_that_keeps_the_store_of_many_workers_may_open_as_many_connections(
    workers: int, limits: tuple[int, int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: now.append(new))
    allow_connections(workers)
    assert now[-1] == (expected, limits[1])


def test_the_start_of_one_of_several_nodes_tells_the_workers_here_and_in_all() -> None:
    alone = RoundInfo(attempt=1, round="a", address="", workers=(2,))
    both = RoundInfo(attempt=1, round="a", address="", nodes=(0, 1), workers=(1, 3), node=1)
    assert alone.started(2, standby=False) == "2 workers started"
    assert both.started(3, standby=False) == "3 workers started here, 4 in all"
    assert both.started(3, standby=True) == "3 standby workers took over here, 4 in all"
