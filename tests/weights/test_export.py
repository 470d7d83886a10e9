"""The states of a run are exported with the user's own keys and every bit, for programs without holdfast."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast import cli
from holdfast.checkpoint import manifest, retention, snapshot
from holdfast.checkpoint.payload import flatten
from holdfast.checkpoint.store import DirectoryStore
from holdfast.errors import BadInput, Corrupt, NoSnapshot
from holdfast.events import Commit, Recover
from holdfast.history.log import HistoryWriter
from holdfast.weights.export import export
from holdfast.weights.locate import missing_commit


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2, dtype=torch.bfloat16))


def compiled_model(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def saved(out: Path, step: int, states: dict[str, Any]) -> Path:
    """A run with one more snapshot, as runs save them."""
    (out / "history").mkdir(parents=True, exist_ok=True)
    flat = flatten(states)
    extra = {**flat.extra, "config": {}, "conditions": {}, "generators": [{}]}
    snapshot.save(DirectoryStore(out / "checkpoints"), step, flat.tensors, extra)
    return out


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a model, an optimizer that has stepped, and a scheduler."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    things = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    saved(tmp_path / "run", 5, {"model": nn.Linear(4, 3).state_dict()})
    return saved(tmp_path / "run", 10, {name: thing.state_dict() for name, thing in things.items()})


def committed(out: Path, *steps: int) -> None:
    """Record the saves of rank 0."""
    with HistoryWriter(out / "history", "rank-0") as history:
        for step in steps:
            history.append(Commit(1, step, 1))


def test_a_newest_snapshot_that_is_gone_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    committed(run, 5, 10)
    assert holdfast(monkeypatch, "verify", run) == 0
    committed(run, 15)
    assert holdfast(monkeypatch, "verify", run) == 1
    assert "missing: the snapshot of step 15" in capfd.readouterr().out
    assert holdfast(monkeypatch, "export", run, run.parent / "model.pt") == 0
    assert (
        "the snapshot of step 15 was committed but is gone: this is the newest one left, of step 10"
        in capfd.readouterr().err
    )
    shutil.rmtree(run / "checkpoints")
    for command in (["export", run, run.parent / "other.pt"], ["verify", run], ["inspect", run]):
        assert holdfast(monkeypatch, *command) == 2
        assert "are gone: the last commit was step 15, and none is left" in capfd.readouterr().err


def test_what_a_run_has_set_aside_or_gone_back_before_is_not_missing(run: Path) -> None:
    committed(run, 5, 10)
    store = DirectoryStore(run / "checkpoints")
    retention.set_aside(store, 10)
    assert missing_commit(run, store) is None
    with HistoryWriter(run / "history", "rank-0") as history:
        history.append(Recover(2, 5, 0, 0, "keyed", 0.0))
    shutil.rmtree(run / "checkpoints" / "set-aside-00000010-0")
    assert missing_commit(run, store) is None
    manifest.remove(store, 5)
    assert missing_commit(run, store) == 5


def holdfast(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_load_gives_the_state_of_every_protected_thing(run: Path) -> None:
    states = hf.load(run)
    assert list(states) == ["model", "optimizer", "scheduler"]
    assert states["scheduler"]["milestones"] == {1: 1, 2: 1}
    nn.Linear(4, 3).load_state_dict(hf.load(run, name="model"))
    assert list(hf.load(str(run), step=5)) == ["model"]
    with pytest.raises(BadInput, match="it protects model, optimizer, scheduler"):
        hf.load(run, name="ema")
    with pytest.raises(NoSnapshot, match=r"it has \[5, 10\]"):
        hf.load(run, step=7)


def test_load_falls_back_past_a_damaged_snapshot(run: Path) -> None:
    payload = run / "checkpoints" / "step-00000010" / "shard-00000-of-00001.safetensors"
    payload.write_bytes(payload.read_bytes()[:-1] + b"\xff")
    assert list(hf.load(run)) == ["model"]
    with pytest.raises(Corrupt):
        hf.load(run, step=10)


READ = """
import json, sys
import torch
try:
    import holdfast
except ImportError:
    pass
else:
    raise AssertionError("holdfast is on the path")
folder = sys.argv[1]
import safetensors.torch
import torch.distributed.checkpoint as dcp
from torch import nn
expected = torch.load(f"{folder}/expected.pt", weights_only=True)
model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2, dtype=torch.bfloat16))
found = {"safetensors": safetensors.torch.load_file(f"{folder}/m.safetensors")}
found["pt"] = torch.load(f"{folder}/m.pt", weights_only=True)
found["dcp"] = {key: torch.empty_like(value) for key, value in expected.items()}
dcp.load(found["dcp"], checkpoint_id=f"{folder}/m", no_dist=True)
for how, state in found.items():
    model.load_state_dict(state)
    assert state.keys() == expected.keys(), how
    for key, value in expected.items():
        assert state[key].dtype == value.dtype and torch.equal(state[key], value), (how, key)
everything = torch.load(f"{folder}/all.pt", weights_only=True)
assert sorted(everything) == ["model", "optimizer"], everything.keys()
with safetensors.safe_open(f"{folder}/m.safetensors", "pt") as file:
    print(json.dumps(file.metadata()))
"""


def test_plain_torch_safetensors_and_dcp_read_equal_bits_without_holdfast(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    run = saved(tmp_path / "run", 10, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    torch.save(dict(model.state_dict()), tmp_path / "expected.pt")
    for name in ("m.safetensors", "m.pt", "m/"):
        export(hf.load(run, name="model"), f"{tmp_path}/{name}")
    export(hf.load(run), f"{tmp_path}/all.pt")
    script = tmp_path / "read.py"
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    blocked = "import sys; sys.modules['holdfast'] = None; sys.argv = sys.argv[1:]; exec(open(sys.argv[0]).read())"
    script.write_text(READ)
    ended = subprocess.run(
        [sys.executable, "-c", blocked, script, tmp_path], capture_output=True, text=True, timeout=120, env=clean
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {"format": "pt"}  # transformers asks for it


def test_a_snapshot_of_a_compiled_model_is_exported_with_its_own_keys(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", 1, {"net": compiled_model(network()).state_dict()})
    network().load_state_dict(hf.load(run, name="net"))


def test_the_command_exports_the_model(run: Path, tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    to = tmp_path / "new" / "model.safetensors"
    assert holdfast(monkeypatch, "export", run, to) == 0
    assert "exported model of step 10" in capfd.readouterr().out
    assert holdfast(monkeypatch, "export", run, "--step", 5, tmp_path / "old.pt") == 0
    assert torch.equal(torch.load(tmp_path / "old.pt", weights_only=True)["bias"], hf.load(run, 5, "model")["bias"])
    assert holdfast(monkeypatch, "export", run, "--all", f"{tmp_path}/dcp/") == 0
    assert sorted(path.name for path in (tmp_path / "dcp").iterdir()) == [".metadata", "__0_0.distcp"]
    assert [path for path in tmp_path.rglob("*") if "tmp" in path.name] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{run}", "model.onnx"], "has no known format"),
        (["{run}", "{tmp}/taken.pt"], "taken.pt exists: name another, or give --force"),
        (["{run}", "--all", "{tmp}/all.safetensors"], "a safetensors file can hold only tensors"),
        (["{run}", "--only", "ema", "{tmp}/m.pt"], "this run has no state named 'ema'"),
        (["{run}", "--only", "model", "--all", "{tmp}/m.pt"], "cannot be combined"),
        (["{run}", "--step", "7", "{tmp}/m.pt"], "has no snapshot of step 7: it has [5, 10]"),
        (["{tmp}/empty", "{tmp}/m.pt"], "has no snapshot yet"),
        (["{tmp}/nothing", "{tmp}/m.pt"], "does not exist"),
        (["{tmp}/two", "{tmp}/m.pt"], "this run protects 2 models: give --all, or --only with one of a, b"),
    ],
)
def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: Any, capfd: Any, arguments: list[str], says: str
) -> None:
    (tmp_path / "taken.pt").write_text("mine")
    (tmp_path / "empty" / "history").mkdir(parents=True)
    saved(tmp_path / "two", 1, {"a": nn.Linear(1, 1).state_dict(), "b": nn.Linear(1, 1).state_dict()})
    before = sorted(tmp_path.rglob("*"))
    assert holdfast(monkeypatch, "export", *(text.format(run=run, tmp=tmp_path) for text in arguments)) == 2
    message = capfd.readouterr().err
    assert says in " ".join(message.split())
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "taken.pt").read_text() == "mine"


def test_force_replaces_a_file_and_a_folder(run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("m.pt", "m.safetensors", "m"):
        assert holdfast(monkeypatch, "export", run, "--step", 5, tmp_path / name) == 0
        assert holdfast(monkeypatch, "export", run, tmp_path / name) == 2
        assert holdfast(monkeypatch, "export", run, "--force", tmp_path / name) == 0
    assert torch.equal(torch.load(tmp_path / "m.pt", weights_only=True)["bias"], hf.load(run, name="model")["bias"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "m.pt", "m.safetensors", "run"]


def test_a_disk_that_refuses_leaves_nothing_behind(run: Path, tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    locked = tmp_path / "file"
    locked.write_text("")
    assert holdfast(monkeypatch, "export", run, locked / "m.pt") == 2
    assert "cannot write" in capfd.readouterr().err


def test_numpy_values_become_tensors(tmp_path: Path) -> None:
    export({"own": {"sums": np.arange(3.0), "best": np.float64(2.5)}}, f"{tmp_path}/own.pt")
    assert torch.load(tmp_path / "own.pt", weights_only=True)["own"]["sums"].tolist() == [0.0, 1.0, 2.0]


def test_inspect_and_verify_take_the_folder_of_a_run(run: Path, monkeypatch: Any, capfd: Any) -> None:
    assert holdfast(monkeypatch, "inspect", run) == 0
    assert "step 10" in capfd.readouterr().out
    assert holdfast(monkeypatch, "verify", run) == 0
    assert "all good: 2 saves" in capfd.readouterr().out
    (run / "checkpoints").rename(run.parent / "elsewhere")
    assert holdfast(monkeypatch, "verify", run) == 2
    (run / "run.json").write_text(json.dumps({"script": "x.py", "checkpoints": str(run.parent / "elsewhere")}))
    assert holdfast(monkeypatch, "verify", run) == 0
