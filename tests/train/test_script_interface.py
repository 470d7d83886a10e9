"""What a script says to its run: batches like the data they carry, its own names in snapshots, plain words and values."""

import dataclasses
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

import holdfast as hf
from attached_runs import attach
from finished_run import last
from holdfast.errors import BadInput
from holdfast.train.iterators import Batch, moved
from holdfast.train.state.protected import Protected
from holdfast.train.state.unwrapped_models import uncompiled_state

Pair = namedtuple("Pair", "x y")


class Words:
    """Samples as tokenizers make them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.full((3,), index), "labels": index, "about": {"mask": torch.ones(3), "name": "n"}}


def batch_of(data: Any) -> Batch:
    return Batch(data, torch.zeros(1).numpy(), 1.0, True, 0, 0, 0)


def test_a_batch_of_dicts_is_used_like_a_dict() -> None:
    run = attach()
    run.protect(model=nn.Linear(1, 1))
    batch = next(iter(run.batches(Words(), global_batch=4, num_epochs=1)))
    assert list(batch) == ["input_ids", "labels", "about"] == list(batch.keys())
    assert batch["input_ids"].shape == (4, 3)
    assert "labels" in batch
    assert dict(**batch)["about"]["name"] == ["n"] * 4


def test_a_batch_moves_with_all_that_is_nested_in_it() -> None:
    @dataclasses.dataclass
    class Own:
        x: torch.Tensor
        name: str

    data = {
        "a": [torch.zeros(1), (torch.zeros(1), "text")],
        "b": Pair(torch.zeros(1), 7),
        "c": Own(torch.zeros(1), "n"),
    }
    there = batch_of(data).to(torch.float64)
    assert there["a"][0].dtype == there["a"][1][0].dtype == there["b"].x.dtype == there["c"].x.dtype == torch.float64
    assert (there["a"][1][1], there["b"].y, there["c"].name) == ("text", 7, "n")
    assert isinstance(there["b"], Pair)
    assert there.is_last
    x, y = batch_of([torch.zeros(1), torch.ones(1)]).to("cpu")
    assert (float(x), float(y)) == (0.0, 1.0)
    assert type(moved(OrderedDict(a=1), "cpu")) is OrderedDict


def test_a_batch_of_pairs_that_is_used_as_a_dict_says_what_it_is() -> None:
    with pytest.raises(BadInput, match="holds a list, which has no keys"):
        batch_of(default_collate([(1, 2)])).keys()


def test_only_rank_0_prints(capsys: pytest.CaptureFixture[str]) -> None:
    run = attach()
    run.print("loss", 1.5)
    assert run.is_main
    run._session.ranks.rank = 1
    run.print("loss", 2.5)
    assert not run.is_main
    assert capsys.readouterr().out == "loss 1.5\n"


class Net(nn.Module):
    """A model of which a part may be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(2, 3), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x))


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", ["whole", "part"])
def test_names_in_a_snapshot_are_those_of_the_plain_model(tmp_path: Path, wrap: str) -> None:
    run = attach(tmp_path)
    model: Any = Net()
    if wrap == "part":
        model.first = compiled(model.first)
    model = run.replicate(compiled(model) if wrap == "whole" else model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.protect(model=model, optimizer=optimizer)
    for batch in run.batches(torch.randn(8, 2), global_batch=4, num_epochs=1):  # type: ignore[arg-type]
        model(batch.data).square().mean().backward()
        optimizer.step()
    names = {name.removeprefix("model/") for name in last(tmp_path).tensors if name.startswith("model/")}
    assert names == set(Net().state_dict())
    plain = Net()
    saved = Protected({"model": model}).capture()["model"]
    plain.load_state_dict(saved)
    assert uncompiled_state(model)._metadata == plain.state_dict()._metadata  # type: ignore[attr-defined]
    assert wrap == "part" or type(run.unwrap(model)) is Net


def test_tab_completion_shows_what_is_loaded_when_first_used() -> None:
    assert {"attach", "Run", "Batch", "audit_run"} <= set(dir(hf))
