"""Weights leave a run tensor by tensor, and one tensor is loaded without the others."""

import json
import os
import subprocess
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import holdfast as hf
from holdfast import cli
from holdfast.checkpoint.store import DirectoryStore, Reader
from holdfast.errors import BadInput, Corrupt
from holdfast.weights.write_safetensors import divide, parse_size
from repository import ROOT
from saved_runs import saved_by_ranks

MIB = 1 << 20


def network(width: int = 512, layers: int = 4) -> nn.Module:
    torch.manual_seed(3)
    parts = [nn.Linear(width, width) for _ in range(layers)]
    return nn.Sequential(*parts, nn.BatchNorm1d(width), nn.Linear(width, 3, dtype=torch.bfloat16))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 3 ranks with a model of 4 MiB and its optimizer, and an older snapshot."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    saved_by_ranks(tmp_path / "run", 1, {"model": model.state_dict()}, 3)
    optimizer.step()
    return saved_by_ranks(tmp_path / "run", 2, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, 3)


def holdfast(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def from_dcp(folder: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state = {key: torch.empty_like(value) for key, value in like.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is only one process
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    same = (value.dtype == other[key].dtype and torch.equal(value, other[key]) for key, value in one.items())
    return one.keys() == other.keys() and all(same)


def test_every_format_has_the_bits_of_a_snapshot_of_three_ranks(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = dict(hf.load(run, name="model"))
    for arguments in (["m.safetensors"], ["hf/", "--shard-size", "2MB"], ["dcp/"], ["m.pt"]):
        assert holdfast(monkeypatch, "export", run, tmp_path / arguments[0], *arguments[1:]) == 0
    assert equal(safetensors.torch.load_file(tmp_path / "m.safetensors"), expected)
    assert equal(torch.load(tmp_path / "m.pt", weights_only=True), expected)
    assert equal(from_dcp(tmp_path / "dcp", expected), expected)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(value.nbytes for value in expected.values())}
    assert index["weight_map"].keys() == expected.keys()
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert (
        files
        == sorted(set(index["weight_map"].values()))
        == [f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)]
    )
    parts = [safetensors.torch.load_file(tmp_path / "hf" / name) for name in files]
    assert equal({key: value for part in parts for key, value in part.items()}, expected)


def test_a_model_that_fits_one_file_needs_no_index(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert holdfast(monkeypatch, "export", run, tmp_path / "hf", "--shard-size", "5GB") == 0
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["model.safetensors"]


def test_everything_is_exported_to_dcp(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert holdfast(monkeypatch, "export", run, tmp_path / "dcp", "--all") == 0
    moment = hf.load(run, name="optimizer")["state"][0]["exp_avg"]
    key = "optimizer.state.0.exp_avg"
    assert equal(from_dcp(tmp_path / "dcp", {key: moment}), {key: moment})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{tmp}/m.safetensors", "--shard-size", "5GB"], "writes several files, and {tmp}/m.safetensors is one"),
        (["{tmp}/hf", "--shard-size", "5"], "'5' is not a size: write it as 500MB or 5GB"),
        (["{tmp}/hf", "--shard-size", "0GB"], "'0GB' is not a size"),
        (["{tmp}/hf", "--all", "--shard-size", "5GB"], "a safetensors file can hold only tensors"),
    ],
)
def test_shards_of_something_else_are_refused_and_nothing_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, arguments: list[str], says: str
) -> None:
    assert holdfast(monkeypatch, "export", run, *(text.format(tmp=tmp_path) for text in arguments)) == 2
    assert says.format(tmp=tmp_path) in " ".join(capfd.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_tensors_are_divided_among_files_in_their_order() -> None:
    assert divide({"a": 3, "b": 3, "c": 9, "d": 1, "e": 5}, 6) == [["a", "b"], ["c"], ["d", "e"]]
    assert divide({}, 6) == [[]]
    assert (parse_size("5GB"), parse_size("200mb")) == (5 * 10**9, 200 * 10**6)


def damage(path: Path, offset: int) -> None:
    """Change one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        (value,) = file.read(1)
        file.seek(offset)
        file.write(bytes([value ^ 1]))


@pytest.mark.parametrize("to", ["m.safetensors", "dcp/"])
def test_damage_found_while_writing_falls_back_to_an_older_snapshot(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, to: str
) -> None:
    damage(run / "checkpoints" / "step-00000002" / "shard-00001-of-00003.safetensors", MIB)
    assert holdfast(monkeypatch, "export", run, f"{tmp_path}/{to}") == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "passed over step-00000002/" in said
    assert "exported model of step 1" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["run", to.rstrip("/")])


class CountingStore(DirectoryStore):
    """A store that counts the bytes that are read. Several threads read at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.sizes: list[int] = []

    @property
    def count(self) -> int:
        return sum(self.sizes)

    @contextmanager
    def open(self, name: str) -> Iterator[Reader]:
        with super().open(name) as reader:

            def read_at(offset: int, room: memoryview) -> int:
                size = reader.read_at(offset, room)
                self.sizes.append(size)
                return size

            yield replace(reader, read_at=read_at)


def test_one_tensor_is_loaded_without_the_rest(run: Path) -> None:
    whole = hf.load(run)
    assert torch.equal(hf.load(run, tensor="1.weight"), whole["model"]["1.weight"])
    moment = hf.load(run, name="optimizer", tensor="state/2/exp_avg")
    assert torch.equal(moment, whole["optimizer"]["state"][2]["exp_avg"])
    assert hf.load(run, step=1, tensor="4.num_batches_tracked").shape == ()
    with pytest.raises(BadInput, match=r"model has no tensor named 'head': it has 0.weight, 0.bias, .* and 11 more"):
        hf.load(run, tensor="head")
    with pytest.raises(BadInput, match=r"optimizer has no tensor named '1.weight'"):
        hf.load(run, name="optimizer", tensor="1.weight")


def test_of_a_large_snapshot_only_what_is_around_the_tensor_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = large_run(tmp_path / "run", tensors=8)
    store = CountingStore(run / "checkpoints")
    monkeypatch.setattr("holdfast.weights.load.store_of", lambda _: store)
    assert hf.load(run, tensor="layer.6")[1, 1].item() == 6.0
    most = (16 + 2 * (8 + 1)) * MIB + (64 << 10)
    assert 16 * MIB < store.count <= most, "of 128 MiB: the tensor, the start of each file, and the manifest"


def test_damage_elsewhere_in_a_snapshot_does_not_prevent_the_load_of_one_tensor(tmp_path: Path) -> None:
    run = large_run(tmp_path / "run", tensors=3)
    path = run / "checkpoints" / "step-00000001" / "shard-00001-of-00002.safetensors"
    damage(path, 20 * MIB)
    assert hf.load(run, tensor="layer.0").mean().item() == 0.0
    with pytest.raises(Corrupt):
        hf.load(run, step=1)


def large_run(out: Path, tensors: int) -> Path:
    """A run of two ranks with tensors of 16 MiB."""
    state = OrderedDict((f"layer.{number}", torch.full((1024, 4096), float(number))) for number in range(tensors))
    vars(state)["_metadata"] = OrderedDict()
    return saved_by_ranks(out, 1, {"model": state})


PEAK = """
import re, sys
from pathlib import Path
import torch, torch.distributed.checkpoint
from holdfast.weights.export import export
from holdfast.weights.load import from_snapshot
from holdfast.weights.locate import store_of

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

run, folder = sys.argv[1:]
for to, how in (("x.safetensors", {}), ("hf", {"shard_size": "40MB"}), ("dcp", {})):
    export({"weight": torch.ones(1)}, str(Path(folder, f"before-{to}")), **how)  # imports everything
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    from_snapshot(store_of(run), None, lambda saved: export(saved.state("model"), f"{folder}/{to}", **how))
    print(to, peak() - before)
"""
"""Prints by how many MiB the largest memory use of the process grew in each export."""


@pytest.mark.slow
def test_an_export_holds_about_one_tensor_in_memory(tmp_path: Path) -> None:
    run = large_run(tmp_path / "run", tensors=12)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", PEAK, str(run), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 0, ended.stderr
    grown = {name: int(size) for name, size in (line.split() for line in ended.stdout.splitlines())}
    assert list(grown) == ["x.safetensors", "hf", "dcp"]
    assert max(grown.values()) < 64, f"{grown}: MiB, of a model of 192"
