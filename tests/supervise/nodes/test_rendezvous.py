"""What a node that keeps the store of the workers needs from its machine."""

import resource

import pytest

from holdfast.supervise.nodes.rendezvous import allow_connections


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
