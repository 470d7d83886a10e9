"""A source of weights is found, refused if it is unsafe or incomplete, and read only where it is needed."""

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast.checkpoint.sharding import Box, within
from holdfast.checkpoint.stored_tensor import StoredTensor, of_tensor
from holdfast.errors import BadInput, Corrupt
from holdfast.runs.config import WeightsSource
from holdfast.train.state.protected import Protected
from holdfast.weights import content_digest
from holdfast.weights.content_digest import tabulate, verified
from holdfast.weights.export import export
from holdfast.weights.initial import load_initial_weights, match
from holdfast.weights.source import from_source, resolve
from saved_runs import saved_by_ranks

MIB = 1 << 20
STATE = {"weight": torch.arange(12.0).reshape(4, 3), "bias": torch.ones(4)}


def tensors_of(path: Path) -> dict[str, StoredTensor]:
    return dict(from_source(WeightsSource(place=str(path)), lambda content: content.tensors))


@contextmanager
def reading_at_most(count: int) -> Iterator[None]:
    """Fail if this process reads more than `count` bytes of files in the `with` block."""

    def total() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])  # rchar

    before = total()
    yield
    assert total() - before <= count


@pytest.mark.parametrize("name", ["w.safetensors", "hf", "dcp"])
def test_only_the_rows_that_are_asked_for_are_read(tmp_path: Path, name: str) -> None:
    large = torch.arange(4.0 * MIB).reshape(4096, 1024)  # 16 MiB
    export({"other": large, "weight": large}, f"{tmp_path}/{name}", shard_size="20MB" if name == "hf" else None)
    with reading_at_most(3 * MIB):
        part = tensors_of(tmp_path / name)["weight"].read_part(((1000, 1512), (0, 1024)))  # 2 MiB
    assert torch.equal(torch.as_tensor(part), large[1000:1512])
    source = resolve(WeightsSource(place=str(tmp_path / name)))
    assert source.table is not None
    stored = verified(tensors_of(tmp_path / name)["weight"], source.table["weight"], AssertionError)
    with reading_at_most(5 * MIB):  # the parts that have a digest are of 1 MiB
        part = stored.read_part(((1000, 1512), (0, 512)))
    assert torch.equal(torch.as_tensor(part), large[1000:1512, :512])


def test_tensors_without_values_and_numbers_are_read_from_dcp(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is only one process
        dcp.save({"model": {"a": torch.ones(0, 3), "n": torch.tensor(7)}}, checkpoint_id=tmp_path / "x", no_dist=True)
    found = tensors_of(tmp_path / "x")
    assert torch.as_tensor(found["model.a"].read()).shape == (0, 3)
    assert int(torch.as_tensor(found["model.n"].read())) == 7


def test_every_format_has_the_same_digest(tmp_path: Path) -> None:
    export(STATE, f"{tmp_path}/w.safetensors")
    export(STATE, f"{tmp_path}/hf", shard_size="1KB")
    export(STATE, f"{tmp_path}/w.pt")
    export(STATE, f"{tmp_path}/dcp")
    torch.save(STATE, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    model = nn.Linear(3, 4)
    model.load_state_dict(STATE)
    saved_by_ranks(tmp_path / "run", 1, {"model": model.state_dict()}, 3)
    names = ("w.safetensors", "hf", "w.pt", "dcp", "old.pt", "run")
    sources = [resolve(WeightsSource(place=str(tmp_path / name))) for name in names]
    assert len({source.digest for source in sources}) == 1
    assert [source.step for source in sources] == [None] * 5 + [1]
    for source in sources:
        protected = Protected({"model": nn.Linear(3, 4)})
        load_initial_weights(replace(source, table=None), protected)  # a supervisor of an earlier version has none
        assert torch.equal(protected.capture()["model"]["weight"], STATE["weight"])


def test_weights_that_change_after_the_run_began_are_refused(tmp_path: Path) -> None:
    export(STATE, f"{tmp_path}/w.safetensors")
    source = resolve(WeightsSource(place=str(tmp_path / "w.safetensors")))
    path = tmp_path / "w.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(BadInput, match="has changed since this run started"):
        load_initial_weights(source, Protected({"model": nn.Linear(3, 4)}))


@given(data=st.data(), shape=st.lists(st.integers(0, 7), max_size=3), chunk=st.integers(1, 40))
def test_every_part_is_verified_by_the_digests_around_it(data: st.DataObject, shape: list[int], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content_digest, "CHUNK", chunk)
        values = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).reshape(shape)
        table = tabulate({"x": of_tensor(values)})["x"]
        box: Box = tuple(
            (first, data.draw(st.integers(first, size)))
            for size in shape
            for first in [data.draw(st.integers(0, size))]
        )
        index = within(box, tuple((0, size) for size in shape))
        found = torch.as_tensor(verified(of_tensor(values), table, AssertionError).read_part(box))
        assert torch.equal(found, values[index])
        if found.numel():
            other = values.clone()
            other[index] += 1
            with pytest.raises(ValueError, match="changed"):
                verified(of_tensor(other), table, lambda: ValueError("changed")).read_part(box)


def folder_of(kind: str, tmp_path: Path) -> Path:
    """A folder that is no good as a Hugging Face model."""
    folder = tmp_path / kind
    export(STATE, str(folder), shard_size="1KB")
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index: Any = {"weight_map": dict.fromkeys(STATE, "part.safetensors")}
    if kind == "far":
        index["weight_map"]["bias"] = "../part.safetensors"
    elif kind == "lacking":
        index["weight_map"]["head"] = "part.safetensors"
    elif kind == "gone":
        index["weight_map"]["head"] = "model-2.safetensors"
    elif kind == "list":
        index = [1]
    elif kind == "several":
        (folder / "ema.safetensors.index.json").write_text(json.dumps(index))
    elif kind == "cut":
        os.truncate(folder / "part.safetensors", 100)
    elif kind == "loose":
        (folder / "more.safetensors").write_bytes((folder / "part.safetensors").read_bytes())
        return folder
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("far", "'../part.safetensors' is not a safetensors file beside it"),
        ("lacking", "says that 'head' is in part.safetensors, which lacks it"),
        ("gone", "cannot read .*model-2.safetensors: No such file"),
        ("list", "is not an index of safetensors files"),
        ("several", "holds several sets of weights .ema.safetensors.index.json, model.safetensors.index.json."),
        ("cut", "is not a well-formed safetensors file"),
        ("loose", "holds several sets of weights .more.safetensors, part.safetensors.: name one"),
    ],
)
def test_a_model_that_is_incomplete_or_unclear_is_refused(tmp_path: Path, kind: str, says: str) -> None:
    with pytest.raises(Exception, match=says) as refused:
        tensors_of(folder_of(kind, tmp_path))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_cut_off_later_is_damaged(tmp_path: Path) -> None:
    for name in ("w.safetensors", "dcp"):
        export(STATE, f"{tmp_path}/{name}")
        stored = tensors_of(tmp_path / name)["weight"]
        os.truncate(tmp_path / name if name != "dcp" else tmp_path / "dcp" / "__0_0.distcp", 64)
        with pytest.raises(Corrupt):
            stored.read()


class Tied(nn.Module):
    """A network whose two layers have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.head.weight = self.embed.weight


def test_of_a_tied_parameter_one_name_is_enough(tmp_path: Path) -> None:
    export({"embed.weight": torch.eye(3)}, f"{tmp_path}/w.safetensors")
    model = Tied()
    load_initial_weights(resolve(WeightsSource(place=str(tmp_path / "w.safetensors"))), Protected({"model": model}))
    assert torch.equal(model.head.weight, torch.eye(3))
    assert model.head.weight is model.embed.weight


def test_states_beside_the_weights_of_torchtitan_are_left_out() -> None:
    beside = {"optimizer.state.weight.exp_avg": torch.ones(4, 3), "train_state.step": torch.tensor(3)}
    model = nn.Linear(3, 4)
    assert match("model", model.state_dict(), {**STATE, **beside}).differences == []
    assert match("model", model.state_dict(), {**STATE, "head": STATE["bias"]}).differences == ["head is unexpected"]
    own = nn.ModuleDict({"optimizer": nn.Linear(3, 4)})
    state = {f"optimizer.{key}": value for key, value in STATE.items()}
    assert match("model", own.state_dict(), state).differences == []


def test_integers_are_not_taken_for_weights() -> None:
    found = match("model", nn.Linear(3, 4).state_dict(), {**STATE, "weight": torch.ones(4, 3, dtype=torch.int8)})
    assert found.differences == ["weight has dtype int8, not float32"]
