"""An attempt of one rank: its store refuses every change once other nodes continue without this one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from holdfast.checkpoint import retention, terms
from holdfast.checkpoint.store import DirectoryStore
from holdfast.checkpoint.terms import Term
from holdfast.distributed.ranks import NODE, TERM, Ranks
from holdfast.errors import WorkerLost
from holdfast.runs.config import RunConfig
from holdfast.train.state.attempt import AttemptContext, begin
from holdfast.train.state.protected import Protected
from holdfast.train.state.restore import SnapshotFetch, restore, restore_shard
from saved_runs import saved_by_ranks


@pytest.fixture
def ranks() -> Ranks:
    messages: Any = HashStore()
    return Ranks(rank=0, size=1, store=messages, grouped=False, device=torch.device("cpu"), connect=lambda: messages)


@pytest.fixture
def attempt(tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Iterator[AttemptContext]:
    """The attempt of rank 0 on node 0, which belongs to term 1."""
    monkeypatch.setenv(TERM, "1")
    monkeypatch.setenv(NODE, "0")
    monkeypatch.setenv("HOLDFAST_OUT", str(tmp_path))
    attempt = begin(tmp_path, ranks, RunConfig(script="t.py"))
    yield attempt
    attempt.record.close()


def test_a_restore_removes_nothing_once_other_nodes_continue(attempt: AttemptContext, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "checkpoints")
    store.put("step-00000003/extra.json", [b"of the other nodes"])
    terms.take(store, Term(2, "token", "node1:1", (1,)))
    with pytest.raises(WorkerLost, match="other nodes continued without this node"):
        retention.tidy(attempt.store, attempt.keep_last)
    assert "step-00000003/extra.json" in store.names()


@pytest.mark.parametrize(
    "restores",
    [
        lambda attempt, ranks, protected: restore(SnapshotFetch(attempt), attempt, ranks, protected),
        lambda attempt, ranks, protected: restore_shard(attempt, ranks, protected, 3),
    ],
    ids=["restore", "restore_shard"],
)
def test_a_restore_records_no_snapshot_of_the_nodes_that_continue(
    attempt: AttemptContext, ranks: Ranks, tmp_path: Path, restores: Callable[..., Any]
) -> None:
    terms.take(DirectoryStore(tmp_path / "checkpoints"), Term(2, "token", "node1:1", (1,)))
    model = nn.Linear(2, 1)
    saved_by_ranks(tmp_path, 3, {"model": model.state_dict()}, 1, term=2)
    with pytest.raises(WorkerLost, match="other nodes continued without this node"):
        restores(attempt, ranks, Protected({"model": model}))
    attempt.record.flush()
    assert '"commit"' not in (tmp_path / "history" / "rank-0.jsonl").read_text()
