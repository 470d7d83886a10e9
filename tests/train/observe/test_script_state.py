"""What a script holds beside what it protects is found from its variables, and named by them."""

import random
import sys
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.train.observe import value_digests
from holdfast.train.observe.script_state import frames_of_script, held


@pytest.fixture(autouse=True)
def no_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of a script are looked at, too: those of other tests in this process are not its own."""
    tests = str(Path(__file__).parents[2])
    for name, module in list(sys.modules.items()):
        if name != __name__ and (getattr(module, "__file__", None) or "").startswith(tests):
            monkeypatch.delitem(sys.modules, name)


class Slotted:
    __slots__ = ("rng", "unset")

    def __init__(self) -> None:
        self.rng = random.Random(1)


class Stubborn:
    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("a proxy of nothing")


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2), persistent=False)
        self.register_buffer("saved", torch.zeros(2))
        self.seen = 0


def found(**roots: Any) -> dict[str, str]:
    return {path: each.kind for path, each in held([], roots, {}).items() if each.kind != "value"}


@pytest.mark.parametrize(
    ("thing", "path"),
    [
        (np.random.default_rng(1), "it"),
        (np.random.RandomState(1), "it"),
        (torch.Generator(), "it"),
        (random.Random(1), "it"),
        ({"a": [random.Random(1)]}, "it.a[0]"),
        (deque([random.Random(1)]), "it[0]"),
        (Slotted(), "it.rng"),
        (partial(print, random.Random(1)), "it[0]"),
    ],
)
def test_a_generator_is_found_wherever_it_is_kept(thing: Any, path: str) -> None:
    assert found(it=thing)[path] == "generator"


def test_variables_of_running_functions_and_closures_are_searched() -> None:
    rng = random.Random(1)

    def draw() -> float:
        return rng.random()

    assert found(draw=draw) == {"draw.rng": "generator"}
    here = held(frames_of_script(sys._getframe())[:1], {}, {})
    name = "rng in test_variables_of_running_functions_and_closures_are_searched()"
    assert here[name].kind == "generator"
    draw()
    assert held(frames_of_script(sys._getframe())[:1], {}, {})[name].mark != here[name].mark


def test_generators_that_the_run_seeds_are_left_out() -> None:
    assert found(a=torch.default_generator, b=random._inst, c=np.random.mtrand._rand) == {}  # type: ignore[attr-defined]


def test_values_of_a_protected_model_outside_its_state_dict_are_found() -> None:
    model = Hidden()
    seen = held([], {}, {"model": model})
    assert {path: each.kind for path, each in seen.items() if each.kind != "value"} == {"model.mean": "buffer"}
    assert seen["model.seen"].mark == "0"
    assert seen["model.training"].mark == "True"


@pytest.fixture
def sharded() -> Iterator[nn.Module]:
    """A model that is sharded over two ranks, of which the other one does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    yield fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    dist.destroy_process_group()


def test_distributed_tensors_are_found_by_their_own_names_and_those_of_a_protected_model_left_out(
    sharded: nn.Module,
) -> None:
    average = [value.detach().clone() for value in sharded.parameters()]
    shards = [value.to_local() for value in sharded.parameters()]
    seen = held([], {"average": average, "shards": shards}, {"model": sharded})
    names = {path: each.type for path, each in seen.items() if each.kind != "value"}
    assert names == {f"average[{number}]": "DTensor" for number in range(4)}


def test_what_fsdp_keeps_in_a_module_is_not_read(sharded: nn.Module) -> None:
    for _ in range(2):  # FSDP would not find its memory again
        sharded(torch.ones(1, 2)).sum().backward()
        assert held([], {"it": sharded}, {}).keys() >= {"it.0.weight", "it.1.bias"}


def test_a_tensor_whose_memory_is_freed_can_get_memory_again() -> None:
    tensor = torch.ones(3)
    size = tensor.untyped_storage().nbytes()
    tensor.untyped_storage().resize_(0)
    assert value_digests.mark(tensor) == "tensor float32[3] freed"
    tensor.untyped_storage().resize_(size)


def test_schedulers_and_optimizers_are_found_unless_they_are_protected() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    things = {"model": model, "optimizer": optimizer}
    seen = held([], {"schedule": schedule, "other": optimizer}, things)
    assert {path: each.kind for path, each in seen.items() if each.kind in ("scheduler", "optimizer")} == {
        "schedule": "scheduler"
    }
    assert held([], {"schedule": schedule}, {**things, "scheduler": schedule}).get("schedule") is None


def test_objects_that_raise_are_left_out() -> None:
    assert found(bad=Stubborn(), good=random.Random(1)) == {"good": "generator"}


def test_marks_are_equal_if_and_only_if_the_values_are() -> None:
    values = [
        torch.zeros(2),
        torch.zeros(2, 1),
        torch.zeros(2).double(),
        torch.tensor([0.0, -0.0]),
        np.zeros(2),
        0,
        0.0,
        "0",
    ]
    seen = [value_digests.mark(value) for value in values]
    assert len(set(seen)) == len(values)
    assert seen == [value_digests.mark(value) for value in values]
    assert value_digests.mark(object()) == value_digests.mark(object())


def test_a_cheap_mark_looks_at_a_few_values_of_a_large_tensor() -> None:
    large = torch.zeros(2 * value_digests.WHOLE)
    other = large.clone()
    other[1] = 1
    assert value_digests.mark(large) != value_digests.mark(other)
    assert value_digests.mark(large, cheap=True) == value_digests.mark(other, cheap=True)
    other[0] = 1
    assert value_digests.mark(large, cheap=True) != value_digests.mark(other, cheap=True)


def test_long_texts_are_marked_by_their_digest() -> None:
    assert len(value_digests.mark("a" * 10_000)) < 100
    assert value_digests.mark("a" * 10_000) != value_digests.mark("a" * 9_999 + "b")
