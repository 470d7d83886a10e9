"""A run starts from the weights of another run or of a foreign file: once, exactly, recorded, and safely."""

import json
import os
import pickle
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast as hf
from finished_run import different, events, failed_checks
from holdfast.audit.verdicts import audit, worst
from holdfast.checkpoint.store import DirectoryStore
from holdfast.distributed import ranks
from holdfast.errors import BadInput, Corrupt, HoldfastError
from holdfast.history.log import read_history
from holdfast.runs.config import RunConfig, WeightsSource
from holdfast.supervise.checkpoint_place import first_weights
from holdfast.train.run import Run
from holdfast.train.state import rng
from holdfast.train.state.protected import Protected
from holdfast.weights.export import export
from holdfast.weights.initial import load_initial_weights, match
from holdfast.weights.source import resolve
from supervisor_process import SUPPORT, Start
from training_script import CLASSES, Task, network, train

TASK = Task(epochs=1)  # 6 steps


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended, and its weights in every format."""
    folder = tmp_path_factory.mktemp("before")
    run = begin(folder / "run")
    train(run, TASK)
    run.close()
    for name in ("w.safetensors", "w.pt", "w"):
        export(hf.load(folder / "run", name="model"), str(folder / name))
    return folder


def begin(out: Path, source: WeightsSource | None = None, seed: int = 0) -> Run:
    """A run of one process, in a folder and from a source."""
    config = RunConfig(script="train.py", save_every=3, source=source, seed=seed)
    run = Run(config, ranks.join(60.0), out)
    rng.set_all(rng.key(config.seed, rng.START))
    return run


def source(place: Path, **how: Any) -> WeightsSource:
    return resolve(WeightsSource(place=str(place), **how))


def test_every_format_gives_the_same_weights_and_the_same_digest(before: Path) -> None:
    expected = hf.load(before / "run", name="model")
    digests = set()
    for name in ("run", "w.safetensors", "w.pt", "w"):
        protected = Protected({"model": network(TASK)})
        digests.add(load_initial_weights(source(before / name), protected))
        found = protected.capture()["model"]
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert len(digests) == 1


def test_a_run_begins_with_the_weights_and_a_resume_does_not_take_them_again(before: Path, tmp_path: Path) -> None:
    origin = source(before / "w.pt")
    for out in ("whole", "parts"):
        run = begin(tmp_path / out, origin, seed=5)
        train(run, TASK, steps=None if out == "whole" else 4)
        run.close()
    first = hf.load(tmp_path / "parts", step=0, name="model")
    assert torch.equal(first["0.weight"], hf.load(before / "run", name="model")["0.weight"])
    gone = replace(origin, place=str(tmp_path / "gone.pt"))  # it is not read again
    run = begin(tmp_path / "parts", gone, seed=5)
    train(run, TASK)
    run.close()
    assert different(tmp_path / "whole", tmp_path / "parts") == []
    assert failed_checks(tmp_path / "parts") == []
    took = [(event.what.restored, event.what.weights) for event in events(tmp_path / "parts", "recover")]
    assert took == [(None, origin.digest), (3, None)]


def test_an_attempt_that_dies_before_its_first_snapshot_begins_with_the_same_weights(
    before: Path, tmp_path: Path
) -> None:
    origin = source(before / "run")
    for _ in range(2):
        run = begin(tmp_path / "out", origin)
        model = nn.Linear(1, 1)
        with pytest.raises(BadInput, match=r"do not match model .*0.weight is unexpected"):
            run.protect(model=model)
        run.close()
    run = begin(tmp_path / "out", origin)
    train(run, TASK)
    run.close()
    assert failed_checks(tmp_path / "out") == []
    assert [event.what.weights for event in events(tmp_path / "out", "recover")] == [origin.digest]


def test_a_source_that_has_changed_since_the_run_began_is_refused(before: Path, tmp_path: Path) -> None:
    origin = source(before / "w.pt")
    changed = tmp_path / "w.pt"
    torch.save({"0.weight": torch.zeros(1)}, changed)
    with pytest.raises(BadInput, match="has changed since this run started"):
        load_initial_weights(replace(origin, place=str(changed)), Protected({"model": network(TASK)}))


def test_an_optimizer_is_taken_from_a_run_if_it_is_asked_for(before: Path) -> None:
    model = network(TASK)
    optimizer = torch.optim.AdamW(model.parameters())
    protected = Protected({"model": model, "optimizer": optimizer})
    load_initial_weights(source(before / "run"), protected)
    assert not optimizer.state
    load_initial_weights(source(before / "run", take=("model", "optimizer")), protected)
    assert optimizer.state[model[0].weight]["step"].item() == 6.0  # type: ignore[index]
    with pytest.raises(BadInput, match="only a run has other states"):
        load_initial_weights(source(before / "w.pt", take=("optimizer",)), protected)
    with pytest.raises(BadInput, match="this run has no state named 'ema'"):
        source(before / "run", take=("ema",))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {f"module.{key}": value for key, value in state.items()},
        lambda state: {f"_orig_mod.{key}": value for key, value in state.items()},
        lambda state: {"model": {f"_orig_mod.{key}": value for key, value in state.items()}, "epoch": 3},
        lambda state: {"state_dict": state, "optimizer": {"state": {}}},
        lambda state: {f"model.{key}": value for key, value in state.items()} | {"optimizer.lr": torch.zeros(1)},
    ],
)
def test_weights_are_found_however_a_file_wraps_them(wrap: Any) -> None:
    state = network(TASK).state_dict()
    found = match("net", network(TASK).state_dict(), wrap(dict(state)))
    assert found.differences == []
    assert all(torch.equal(found.values[key], value) for key, value in state.items())


def test_a_partial_source_gives_what_fits_and_names_the_rest(before: Path, caplog: Any, capsys: Any) -> None:
    model = network(TASK)
    model[5] = nn.Linear(20, CLASSES + 1)  # type: ignore[index, operator]
    protected = Protected({"model": model})
    with pytest.raises(BadInput, match=r"5.bias has shape \[5\], not \[6\]; 5.weight has shape"):
        load_initial_weights(source(before / "w.safetensors"), protected)
    head = model[5].weight.clone()  # type: ignore[index]
    load_initial_weights(source(before / "w.safetensors", partial=True), protected, reports=True)
    assert torch.equal(model[5].weight, head)  # type: ignore[index]
    assert torch.equal(model[0].weight, hf.load(before / "run", name="model")["0.weight"])  # type: ignore[index]
    assert "model starts with 4 of its 6 tensors" in caplog.text
    assert capsys.readouterr().err == f"holdfast: loaded model from {before / 'w.safetensors'}\n"


def test_of_several_models_each_takes_its_own_or_one_is_named(before: Path, tmp_path: Path) -> None:
    two = {"model": network(TASK), "ema": network(TASK)}
    with pytest.raises(BadInput, match="choose one with --init-names NAME"):
        load_initial_weights(source(before / "w.pt"), Protected(two))
    load_initial_weights(source(before / "w.pt", take=("ema",)), Protected(two))
    export({name: model.state_dict() for name, model in two.items()}, str(tmp_path / "two.pt"))
    fresh = {"model": network(TASK), "ema": network(TASK)}
    load_initial_weights(source(tmp_path / "two.pt"), Protected(fresh))
    for name, model in two.items():
        assert torch.equal(fresh[name].state_dict()["0.bias"], model.state_dict()["0.bias"])


class Evil:
    """An object that runs code when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def foreign(kind: str, before: Path, folder: Path) -> Path:
    """A source that is no good, of each kind."""
    path = folder / f"bad{kind}"
    if kind == ".pt":
        torch.save({"w": torch.zeros(3), "evil": Evil(folder / "ran")}, path)
    elif kind == "-cut.pt":
        path.write_bytes((before / "w.pt").read_bytes()[:-400])
    elif kind == "-empty.pt":
        path.write_bytes(b"")
    elif kind == "-cut.safetensors":
        path.write_bytes((before / "w.safetensors").read_bytes()[:-1])
    elif kind == ".safetensors":
        path.write_text("no weights at all, but long enough to be read as a header")
    elif kind == ".txt":
        path.write_text("weights")
    elif kind == "-plain.pt":
        torch.save({"lr": 0.1}, path)
    elif kind == "-empty":
        path.mkdir()
    elif kind in ("-evil-dcp", "-cut-dcp", "-far-dcp"):
        export(hf.load(before / "run", name="model"), str(path))
        if kind == "-evil-dcp":
            (path / ".metadata").write_bytes(pickle.dumps(Evil(folder / "ran")))
        elif kind == "-cut-dcp":
            (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[:-2000])
        else:
            index = (path / ".metadata").read_bytes()
            (path / ".metadata").write_bytes(index.replace(b"__0_0.distcp", b"../0_0.distc"))
    return path


KINDS = [
    (".pt", "holds more than weights (a posix.mkdir), and unpickling that could run code"),
    ("-cut.pt", "is not a complete file of torch.save"),
    ("-empty.pt", "is not a complete file of torch.save"),
    ("-cut.safetensors", "is not a well-formed safetensors file"),
    (".safetensors", "is not a well-formed safetensors file"),
    (".txt", "has no known format"),
    ("-plain.pt", "holds no named tensors"),
    ("-empty", "is neither the folder of a run nor a DCP folder"),
    ("-nothing", "does not exist"),
    ("-evil-dcp", "an index has no posix.mkdir, and unpickling it could run code"),
    ("-cut-dcp", "is not a complete folder of torch.distributed.checkpoint"),
    ("-far-dcp", "a part of it lies elsewhere"),
]


@pytest.mark.parametrize(("kind", "says"), KINDS)
def test_what_is_foreign_or_truncated_is_one_line_and_nothing_runs_or_is_made(
    before: Path, tmp_path: Path, kind: str, says: str
) -> None:
    path = foreign(kind, before, tmp_path)
    there = sorted(tmp_path.rglob("*"))
    with pytest.raises((BadInput, Corrupt)) as refused:
        resolve(WeightsSource(place=str(path)))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert sorted(tmp_path.rglob("*")) == there
    assert not (tmp_path / "ran").exists()


def test_a_folder_remembers_its_source(before: Path, tmp_path: Path) -> None:
    origin = source(before / "run")
    assert origin.step == 6
    config = RunConfig(script="train.py", source=origin)
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert RunConfig(script="train.py").to_json()["source"] is None
    (tmp_path / "run.json").write_text(json.dumps(config.to_json()))
    for wished in (None, WeightsSource(place=origin.place)):
        assert first_weights(wished, tmp_path, has_begun=True) == origin
    assert first_weights(None, tmp_path, has_begun=False) is None
    assert repr(origin).endswith(f"run' ({origin.digest[:8]})")
    with pytest.raises(BadInput, match="cannot start from its own weights"):
        first_weights(WeightsSource(place=str(tmp_path)), tmp_path, has_begun=False)
    for record in ({"place": 3}, "w.pt", {**origin.to_json(), "digest": None}):
        with pytest.raises(HoldfastError):
            RunConfig.from_json({"script": "x", "source": record})


def test_a_killed_run_from_a_source_ends_with_the_bits_of_one_that_was_not(
    start: Start, before: Path, tmp_path: Path
) -> None:
    task = {"epochs": 2}
    config: dict[str, Any] = {"script": SUPPORT / "training_script.py", "workers": 2, "save_every": 4}
    wished = WeightsSource(place=str(before / "w.safetensors")).to_json()
    struck = [{"step": 2, "kind": "kill", "targets": [0]}, {"step": 6, "kind": "kill", "targets": [1]}]
    killed = start(task, out="killed", source=wished, failures=struck, **config)
    whole = start(task, out="whole", source=wished, **config)
    refused = start(task, out="refused", source={**wished, "place": str(tmp_path / "no.pt")}, **config)
    assert [job.result().get("verdict") for job in (killed, whole)] == ["completed"] * 2
    assert different(killed.out, whole.out) == []
    assert failed_checks(killed.out) == []
    digest = source(before / "w.safetensors").digest
    (launch,) = killed.events("launch")
    assert (launch.what.source, launch.what.weights) == (wished["place"], digest)  # type: ignore[union-attr]
    assert "does not exist" in refused.result()["refused"]
    assert not refused.out.exists()
    history = list(read_history(killed.out).events)
    for forged in forgeries(history, digest):
        assert worst(audit(forged)) == "fail"


def forgeries(history: list[Any], digest: str) -> Any:
    """Return the same run, with another digest in one of the records of its source."""
    for number, event in enumerate(history):
        if event.kind not in ("launch", "recover"):
            continue
        other = None if event.what.weights == digest else digest
        for weights in (other, "f" * 32):
            changed = event._replace(what=event.what._replace(weights=weights))
            yield [*history[:number], changed, *history[number + 1 :]]


def test_values_of_another_precision_are_cast_as_torch_does() -> None:
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    found = match("model", model.state_dict(), OrderedDict(nn.Linear(2, 2).state_dict()))
    assert found.differences == []


def test_a_store_of_checkpoints_is_no_source_by_itself(tmp_path: Path) -> None:
    DirectoryStore(tmp_path / "store").put("x", [b""])
    with pytest.raises(BadInput, match="neither the folder of a run"):
        resolve(WeightsSource(place=str(tmp_path / "store")))
