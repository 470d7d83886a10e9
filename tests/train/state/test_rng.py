"""Random generators are keyed by where the run is, and what they are keyed to can be captured and compared."""

import json
import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.train.state import rng

PLACES = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))


def draw() -> tuple[object, ...]:
    """A number of every generator, of both kinds that they keep a state for."""
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.random()),
        float(np.random.standard_normal()),
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
    )


@given(number=st.integers(0, 2**64 - 1))
def test_a_key_decides_what_every_generator_draws(number: int) -> None:
    rng.set_all(number)
    before = draw()
    draw()
    rng.set_all(number)
    assert draw() == before


@given(number=st.integers(0, 2**64 - 1))
def test_a_key_is_a_seed_as_everybody_gives_it(number: int) -> None:
    draw()  # a second normal number is kept for the next time, by two of them
    rng.set_all(number)
    keyed = draw()
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)
    assert draw() == keyed


@given(number=st.integers(0, 2**64 - 1), other=st.integers(0, 2**64 - 1))
def test_what_is_captured_tells_states_apart_and_survives_json(number: int, other: int) -> None:
    rng.set_all(number)
    states = rng.capture()
    rng.set_all(other)
    assert (rng.capture() == states) == (number == other)
    rng.set_all(number)
    assert json.loads(json.dumps(rng.capture())) == states
    draw()
    assert all(rng.capture()[name] != state for name, state in states.items())


@given(seeds=st.tuples(st.integers(0, 3), st.integers(0, 3)), places=st.tuples(PLACES, PLACES))
def test_another_seed_purpose_or_place_has_another_key(
    seeds: tuple[int, int], places: tuple[tuple[int, ...], ...]
) -> None:
    purposes = (rng.START, rng.WINDOW)
    asked = {(seed, purpose, *place) for seed in seeds for purpose in purposes for place in places}
    keys = {rng.key(seed, str(purpose), *place) for seed, purpose, *place in asked}  # type: ignore[arg-type]
    assert len(keys) == len(asked)
    assert all(0 <= key < 2**64 for key in keys)


@given(number=st.integers(0, 2**64 - 1), draws=st.integers(0, 2))
def test_who_goes_on_from_handed_over_states_draws_what_would_have_been_drawn(number: int, draws: int) -> None:
    rng.set_all(number)
    for _ in range(draws):
        draw()
    states = rng.States.now()
    expected = draw()
    rng.set_all(0)
    states.restore()
    assert rng.States.now() == states
    assert draw() == expected
