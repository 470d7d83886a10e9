"""The digest of a state: any flipped bit changes it, and nothing else does."""

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import nn

from holdfast.train.whole_digest import (
    _COLUMNS,
    _SMALL,
    DeviceDigest,
    WholeDigest,
    are_finite,
    digest_in_memory,
    replicated_state,
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64)
LARGE = _SMALL + 6 * _COLUMNS + 7  # float32 values: read as a matrix, with a rest


def random_bits(count: int, dtype: torch.dtype) -> torch.Tensor:
    size = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8).view(dtype)


Digest = Callable[..., list[list[int]]]


@pytest.fixture(params=["in memory", "on the device"])
def digest(request: pytest.FixtureRequest) -> Digest:
    """Each of the two ways to digest the tensors that it is called with."""
    compute = digest_in_memory if request.param == "in memory" else DeviceDigest()
    return lambda *tensors: compute(tensors).tolist()


def with_flipped(tensor: torch.Tensor, byte: int, bit: int) -> torch.Tensor:
    flipped = tensor.clone()
    flipped.view(torch.uint8)[byte] ^= 1 << bit
    return flipped


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_flipped_bit_of_a_small_tensor_changes_the_digest(
    digest: Digest, dtype: torch.dtype, count: int
) -> None:
    torch.manual_seed(count)
    tensor = random_bits(count, dtype)
    places = product(range(tensor.nbytes), range(8))
    digests = {digest(with_flipped(tensor, byte, bit))[0][0] for byte, bit in places}
    assert len(digests) == 8 * tensor.nbytes  # all different from each other, too
    assert digest(tensor)[0][0] not in digests


@pytest.mark.parametrize("byte", [0, 3, 4096, 4 * _SMALL, 4 * LARGE - 29, 4 * LARGE - 28, 4 * LARGE - 1])
@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_of_a_large_tensor_changes_the_digest(digest: Digest, byte: int, bit: int) -> None:
    torch.manual_seed(1)
    tensor = random_bits(LARGE, torch.float32)
    assert digest(with_flipped(tensor, byte, bit))[0][0] != digest(tensor)[0][0]


@pytest.mark.parametrize("count", [1000, LARGE])
def test_swapped_values_and_bits_flipped_in_two_places_change_the_digest(digest: Digest, count: int) -> None:
    torch.manual_seed(2)
    tensor = random_bits(count, torch.float32)
    swapped = tensor.clone()
    swapped[[4, 8]] = tensor[[8, 4]]
    assert digest(swapped) != digest(tensor)
    negative = tensor.clone()
    negative[[11, 21]] *= -1  # the highest bit of two integers
    assert digest(negative) != digest(tensor)


def test_the_digest_does_not_depend_on_strides_or_on_the_place_in_memory(digest: Digest) -> None:
    torch.manual_seed(3)
    tensor = torch.randn(6, 3, 5, 4)
    shifted = torch.empty(tensor.numel() + 1)[1:].view_as(tensor).copy_(tensor)
    assert digest(tensor) == digest(tensor.to(memory_format=torch.channels_last)) == digest(shifted)


def test_each_tensor_has_a_digest_of_its_own_even_an_empty_one(digest: Digest) -> None:
    one, two = torch.ones(3), torch.zeros(4)
    assert digest(one, two, torch.empty(0)) == [*digest(one), *digest(two), *digest(torch.empty(0))]
    assert digest() == []


def test_tensors_in_host_memory_are_digested_there() -> None:
    tensors = [torch.randn(3, 4), torch.ones((), dtype=torch.int64), torch.empty(0)]
    assert WholeDigest()(tensors).tolist() == digest_in_memory(tensors).tolist()


def test_the_state_of_replicas_has_the_parameters_their_moments_and_counters_and_nothing_else() -> None:
    model, other = nn.Linear(2, 3), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    (model(torch.ones(1, 2)).sum() + other(torch.ones(1, 2)).sum()).backward()
    optimizer.step()
    state = replicated_state(dict(model.named_parameters()), [optimizer])
    moments = {f"{key} of {name}" for key, name in product(("exp_avg", "exp_avg_sq"), ("weight", "bias"))}
    assert state.keys() == {"weight", "bias", *moments, "optimizer counters (cpu, torch.float32)"}
    assert state["optimizer counters (cpu, torch.float32)"].tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_value_that_is_not_finite_among_the_largest_finite_ones(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = torch.full((3, 50), largest, dtype=dtype)
    values[0] = -largest
    others = [torch.tensor([1e300], dtype=torch.float64), torch.empty(0), torch.tensor([1])]
    assert are_finite([*others, values]).item() == 1
    for value in (math.nan, math.inf, -math.inf):
        spoilt = values.clone()
        spoilt[2, 17] = value
        assert are_finite([*others, spoilt]).item() == 0
