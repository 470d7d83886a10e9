"""A random generator of the script that is drawn from in the first steps, and is not restored, gives a warning."""

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from attached_runs import attach, close_attached_runs  # noqa: F401 - an autouse fixture

STEPS, SAMPLES = 6, 24
Work = Callable[[], object]


class Draws:
    """A script with a generator of its own, of which `make` returns a new one and `draw` takes a few numbers."""

    def __init__(self, make: Callable[[int], Any], draw: Callable[[Any], object]) -> None:
        self.make, self.draw = make, draw


KINDS = {
    "torch.Generator": Draws(torch.Generator().manual_seed, lambda own: torch.rand(3, generator=own)),
    "random.Random": Draws(random.Random, lambda own: own.sample(range(100), 8)),
    "numpy.random.Generator": Draws(np.random.default_rng, lambda own: own.random(3)),
    "numpy.random.RandomState": Draws(np.random.RandomState, lambda own: own.permutation(20)),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """A function that returns the warnings about generators."""
    caplog.set_level(logging.WARNING)
    return lambda: [line for record in caplog.records if "does not restore" in (line := record.getMessage())]


def train(run: Any, each_step: Work, batches: Work | None = None, **protected: Any) -> None:
    """Train a small model for a few steps, and call `each_step` in each of them."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.protect(model=model, optimizer=optimizer, **protected)
    steps: Any = batches() if batches else run.steps(STEPS, global_batch=4)
    for _ in steps:
        each_step()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def made(kind: str) -> Any:
    return torch.Generator().manual_seed(5) if kind == "torch.Generator" else KINDS[kind].make(5)


def test_a_generator_of_the_script_is_named_once(kind: str, tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    generator = made(kind)
    train(attach(tmp_path), lambda: KINDS[kind].draw(generator))
    [line] = warned()
    assert line == (
        f"holdfast: generator in test_a_generator_of_the_script_is_named_once() is a {kind} that the script made: holdfast "
        "does not restore it after a failure. Draw from the global generators (leave out generator=), or seed it in each "
        "step."
    )


def test_a_generator_that_is_drawn_from_before_the_loop_passes(
    kind: str, tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    generator = made(kind)
    KINDS[kind].draw(generator)
    train(attach(tmp_path), lambda: None)
    assert (warned(), generator is not None) == ([], True)


@pytest.mark.parametrize("is_same", [True, False], ids=["the same seed", "a seed for each step"])
def test_a_generator_that_is_seeded_in_each_step_passes(
    kind: str, is_same: bool, tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    generator, step = made(kind), [0]

    def seeded() -> None:
        step[0] += not is_same
        match generator:
            case torch.Generator():
                generator.manual_seed(step[0])
            case np.random.Generator():
                generator.bit_generator.state = np.random.default_rng(step[0]).bit_generator.state
            case _:
                generator.seed(step[0])
        KINDS[kind].draw(generator)

    train(attach(tmp_path), seeded)
    assert warned() == []


def test_a_new_generator_in_each_step_passes(kind: str, tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    held = {"generator": made(kind)}

    def renewed() -> None:
        held["generator"] = made(kind)
        KINDS[kind].draw(held["generator"])

    train(attach(tmp_path), renewed)
    assert warned() == []


class Own:
    """An object that saves and restores its own generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["state"])


def test_a_generator_in_a_protected_object_passes(tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    own = Own()
    generator = own.generator
    train(attach(tmp_path), lambda: torch.rand(1, generator=generator), own=own)
    assert warned() == []


def state_of(generator: Any) -> Any:
    match generator:
        case random.Random():
            return generator.getstate()
        case np.random.Generator():
            return generator.bit_generator.state
        case _:
            return generator.get_state()


def test_a_generator_whose_state_is_protected_passes(
    kind: str, tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    generator = made(kind)
    drawn = {"state": state_of(generator)}

    def draw() -> None:
        KINDS[kind].draw(generator)
        drawn["state"] = state_of(generator)

    train(attach(tmp_path), draw, drawn=drawn)
    assert warned() == []


def test_a_generator_whose_first_state_is_protected_is_named(
    kind: str, tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    generator = made(kind)
    train(attach(tmp_path), lambda: KINDS[kind].draw(generator), drawn={"state": state_of(generator)})
    assert len(warned()) == 1


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        pytest.param(random.Random(5), lambda own: own.gauss(), id="a number that random.Random keeps"),
        pytest.param(np.random.RandomState(5), lambda own: own.randn(), id="a number that RandomState keeps"),
        pytest.param(np.random.Generator(np.random.Philox(5)), lambda own: own.random(), id="words of 64 bits"),
    ],
)
def test_a_protected_state_is_recognized_whatever_it_consists_of(
    generator: Any, draw: Callable[[Any], object], tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    draw(generator)  # of a pair of normal numbers, the generator keeps the second
    drawn = {"state": state_of(generator)}

    def draw_two() -> None:
        draw(generator), draw(generator)
        drawn["state"] = state_of(generator)

    train(attach(tmp_path), draw_two, drawn=drawn)
    assert warned() == []


def test_the_global_generators_pass(tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    held = (torch.default_generator, random.random, np.random.mtrand._rand)
    train(attach(tmp_path), lambda: (torch.rand(1), held[1](), held[2].random()))
    assert warned() == []


# Generators of samplers and loaders


def test_the_generator_of_a_sampler_of_the_run_passes(tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    run, generator = attach(tmp_path), torch.Generator()
    sampler = WeightedRandomSampler(torch.ones(SAMPLES), 4, generator=generator)  # an epoch is one step
    data = TensorDataset(torch.randn(SAMPLES, 3))
    train(run, lambda: None, lambda: run.batches(data, global_batch=4, steps=STEPS, sampler=sampler))
    assert warned() == []


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it, and torch warns
def test_the_generator_of_a_streamed_loader_passes(tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    run, generator = attach(tmp_path), torch.Generator()
    data = TensorDataset(torch.randn(4, 3))
    loader = StatefulDataLoader(data, batch_size=4, sampler=RandomSampler(data, generator=generator))
    train(run, lambda: None, lambda: run.stream(loader, steps=STEPS))
    assert warned() == []


class Drawn(Own):
    """A loader of the script's own class, which saves its own generator."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.rand(4, 3, generator=self.generator)


def test_the_generator_of_a_loader_of_ones_own_class_passes(tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    run, loader = attach(tmp_path), Drawn()
    generator = loader.generator
    train(run, lambda: None, lambda: run.stream(loader, steps=STEPS))
    assert (warned(), generator is loader.generator) == ([], True)


def test_the_generator_of_a_loader_for_evaluation_passes(tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    generator = torch.Generator()
    loader = DataLoader(TensorDataset(torch.randn(8, 3)), shuffle=True, generator=generator)
    train(attach(tmp_path), lambda: list(loader))
    assert warned() == []
