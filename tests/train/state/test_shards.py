"""The state of sharded models: what all ranks save is the whole state, and any number of ranks restores its bits."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # it is public
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

from holdfast.checkpoint import payload, shard_file, snapshot
from holdfast.checkpoint.payload import flatten, unflatten
from holdfast.checkpoint.reader import SnapshotReader
from holdfast.checkpoint.store import DirectoryStore, Store
from holdfast.errors import BadInput
from holdfast.train.state.protected import Protected
from holdfast.train.state.shards import divide, read_parts
from sharded_states import CASES, STEP, world_sizes
from snapshots import same
from stores import CountingStore
from supervisor_process import RunScript

DEADLINE = 600.0

# Several ranks.


@pytest.fixture(scope="module")
def saved_and_restored(run_script: RunScript, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every case was saved and restored by real processes, with one file for each that failed."""
    folder = tmp_path_factory.mktemp("states")
    run_script("sharded_states.py", folder, within=DEADLINE)
    return folder


def outcome(folder: Path, what: str, rank: int) -> str:
    failed = folder / f"failed-{what}-{rank}"
    return failed.read_text() if failed.exists() else "good" if (folder / f"done-{what}-{rank}").exists() else "not run"


@pytest.mark.parametrize(("name", "ranks"), [(name, ranks) for name in CASES for ranks in world_sizes(name)])
def test_the_parts_of_all_ranks_are_the_whole_state(saved_and_restored: Path, name: str, ranks: int) -> None:
    assert {outcome(saved_and_restored, f"{name}-{ranks}", rank) for rank in range(ranks)} == {"good"}
    store = DirectoryStore(saved_and_restored / name / f"{ranks}")
    snapshot.check(store, STEP)
    now, _ = torch.load(saved_and_restored / name / f"{ranks}.pt")
    del now["(the rest)"]
    assert same(snapshot.load(store, STEP).tensors, now)


@pytest.mark.parametrize(
    ("name", "before", "after"), [(name, *pair) for name in CASES for pair in product(world_sizes(name), repeat=2)]
)
def test_any_number_of_ranks_restores_the_same_bits(
    saved_and_restored: Path, name: str, before: int, after: int
) -> None:
    for rank in range(after):
        assert outcome(saved_and_restored, f"{name}-{before}-{after}", rank) == "good"


@pytest.mark.parametrize("name", ["uneven_rows", "hybrid", "tensor_parallel", "unsharded"])
def test_every_rank_saves_about_its_share_of_the_bytes(saved_and_restored: Path, name: str) -> None:
    shards = SnapshotReader(DirectoryStore(saved_and_restored / name / "4"), STEP).manifest.shards
    whole = SnapshotReader(DirectoryStore(saved_and_restored / name / "1"), STEP).manifest.bytes
    assert all(shard.length < 0.7 * whole for shard in shards)  # small files are mostly headers


# One rank.


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def save(store: Store, protected: Protected) -> None:
    state = protected.divide([], 0, 1)
    shard = snapshot.write_shard(store, STEP, payload.encode(state.parts, digests=True))
    snapshot.commit(store, snapshot.draft(STEP, state.flat.extra, state.layout), [shard])


def restored(store: Store, protected: Protected) -> list[str]:
    """Restore the snapshot, and return the differences that keep it from being loaded."""
    reader = SnapshotReader(store, STEP)
    tensors = read_parts(reader, flatten(protected.capture()).tensors, protected.parameter_of, 0)
    state = unflatten(tensors, reader.extra)
    if differences := protected.differences(state):
        return differences
    protected.restore(state)
    return []


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (lambda: nn.Linear(3, 4).double(), "model.weight is float64[4, 3], not float32[4, 3]"),
        (lambda: nn.Linear(3, 4).bfloat16(), "model.weight is bfloat16[4, 3], not float32[4, 3]"),
        (lambda: nn.Linear(3, 5), "model.weight is float32[5, 3], not float32[4, 3]"),
        (lambda: nn.Linear(3, 4, bias=False), "model.bias is gone"),
    ],
)
def test_a_sharded_model_of_other_shapes_or_dtypes_is_named_and_not_changed(
    tmp_path: Path, one_rank: None, other: type[nn.Module], difference: str
) -> None:
    save(DirectoryStore(tmp_path), Protected({"model": sharded(nn.Linear(3, 4))}))
    model = sharded(other())
    before = model.weight.full_tensor().clone()  # type: ignore[operator, union-attr]
    assert difference in restored(DirectoryStore(tmp_path), Protected({"model": model}))
    if difference != "model.bias is gone":
        assert torch.equal(model.weight.full_tensor(), before)  # type: ignore[operator, union-attr]


def test_moments_of_another_dtype_than_the_optimizer_has_now_are_restored_as_saved(
    tmp_path: Path, one_rank: None
) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = sharded(nn.Linear(3, 4))
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = made()
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].double() / 3
    save(DirectoryStore(tmp_path), Protected({"optimizer": optimizer, "model": model}))
    again, other = made()
    assert restored(DirectoryStore(tmp_path), Protected({"optimizer": other, "model": again})) == []
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert two["momentum_buffer"].dtype == torch.float64
        assert torch.equal(one["momentum_buffer"].full_tensor(), two["momentum_buffer"].full_tensor())


def test_partial_sums_are_refused(one_rank: None) -> None:
    value = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (1,)), [Partial()])
    with pytest.raises(BadInput, match="model/a has partial sums"):
        divide(flatten({"model": {"a": value}}), (), 0, 1)


def test_a_mesh_of_some_of_the_ranks_is_refused(one_rank: None) -> None:
    value = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (1,)))
    with pytest.raises(
        BadInput, match=r"distributed over ranks \[0\], and the run has ranks 0 to 3: shard it over run"
    ):
        divide(flatten({"model": {"a": value}}), (), 0, 4)


def test_a_restore_reads_each_byte_about_once_though_dtypes_are_mixed(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = 1 << 10
    for module in (payload, shard_file):
        monkeypatch.setattr(module, "CHUNK", chunk)
    monkeypatch.setattr(shard_file, "SEGMENT", 8 * chunk)

    def made() -> tuple[Protected, torch.optim.Optimizer]:
        model = sharded(nn.Sequential(*(nn.Linear(10, 10) for _ in range(40)))).bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        return Protected({"model": model, "optimizer": optimizer}), optimizer

    protected, optimizer = made()
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # the step counts are float32
    save(DirectoryStore(tmp_path), protected)
    store = CountingStore(DirectoryStore(tmp_path))
    assert restored(store, made()[0]) == []  # type: ignore[arg-type]
    shards = sum(shard.length for shard in SnapshotReader(DirectoryStore(tmp_path), STEP).manifest.shards)
    assert store.bytes_read <= 1.4 * shards + 16 * chunk
