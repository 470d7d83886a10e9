"""Which gradients the next rank can compute from the reduced gradients that it already has, bit for bit."""

import random

import pytest
import torch
from torch import Tensor

from holdfast.live.sharded.derived_gradients import common_factor, derive, times
from holdfast.live.sharded.host_memory import HostMemory
from holdfast.live.sharded.operations import Reduce, Ring, nothing, same_bits

RING = Ring(1, 3)
ROWS, PADDED = (6, 5), 3  # rows of two parameters, over three ranks with up to 2 each; values in a row


class LinkOfOneSum:
    """A link on which the sum of all ranks is what this rank gives."""

    def post(self, *_: object) -> None: ...

    def wait(self, _: None) -> None: ...


def reduced(values: Tensor) -> tuple[Reduce, Tensor]:
    """Return a completed reduction of `values`, and the result of this rank."""
    output = torch.empty(values.numel() // RING.size, dtype=values.dtype)
    reduction = Reduce(output, values, None, HostMemory())
    reduction.run(LinkOfOneSum(), RING, nothing)  # type: ignore[arg-type]
    return reduction, output


def gradients_of(output: Tensor) -> list[Tensor]:
    return [output[:6].view(2, 3), output[6:].view(2, 3)]


def random_values(dtype: torch.dtype = torch.float32, size: int = 36) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(3)).to(dtype)


def test_reduced_gradients_that_nothing_has_changed_are_those_of_the_previous_rank_in_the_same_places() -> None:
    values = random_values()
    reduction, output = reduced(values)
    derived = derive(gradients_of(output), [reduction])
    assert derived is not None
    assert derived.factor == 1
    first, second = derived.of_previous([torch.empty(2, 3), torch.empty(1, 3)])  # the previous rank has one row less
    assert first.flatten().tolist() == values[:6].tolist()
    assert second.flatten().tolist() == values[6:9].tolist()


def test_gradients_without_rows_on_this_rank_are_derived() -> None:
    reduction, output = reduced(random_values())
    derived = derive([output[:12].view(4, 3), output[12:].view(0, 3)], [reduction])
    assert derived is not None
    assert [values.shape for values in derived.of_previous([torch.empty(2, 3), torch.empty(0, 3)])] == [(2, 3), (0, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_clipped_gradients_are_reduced_ones_times_the_number_with_which_they_were_clipped(dtype: torch.dtype) -> None:
    rng = random.Random(11)
    for _ in range(50):
        values = torch.randn(3000, generator=torch.Generator().manual_seed(rng.randrange(1 << 30))).to(dtype)
        coefficient = torch.tensor(rng.uniform(1e-3, 1)).to(dtype)
        clipped = [values[:2000] * coefficient, values[2000:] * coefficient]
        factor = common_factor([values[:2000], values[2000:]], clipped)
        if factor is None:
            assert dtype in (torch.bfloat16, torch.float16), coefficient  # many numbers explain a sample of these
        else:
            assert same_bits(times(values, factor), values * coefficient), (coefficient, factor)


def test_gradients_scaled_in_place_are_derived_with_their_factor() -> None:
    values = random_values()
    reduction, output = reduced(values)
    output.mul_(torch.tensor(0.3))
    derived = derive(gradients_of(output), [reduction])
    assert derived is not None
    (first, _) = derived.of_previous([torch.empty(2, 3)] * 2)
    assert same_bits(times(first, derived.factor).flatten(), values[:6] * torch.tensor(0.3))


def changed(gradients: list[Tensor]) -> None:
    gradients[1].view(-1)[5] += 1


def scaled_differently(gradients: list[Tensor]) -> None:
    gradients[0].mul_(0.5)


def scaled_twice(gradients: list[Tensor]) -> None:
    for gradient in gradients:
        gradient.mul_(0.3).mul_(0.7)


def negative_zero(gradients: list[Tensor]) -> None:
    gradients[0].view(-1)[0].neg_()


def made_anew(gradients: list[Tensor]) -> None:
    gradients[0] = gradients[0].clone()


def transposed(gradients: list[Tensor]) -> None:
    gradients[0] = gradients[0].T


CHANGES = [changed, scaled_differently, scaled_twice, negative_zero, made_anew, transposed]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(change.__name__))
def test_gradients_that_were_changed_in_any_other_way_are_not_derived(change: object) -> None:
    values = random_values(size=36)
    values[12] = 0.0  # this rank's first value
    reduction, output = reduced(values)
    gradients = gradients_of(output)
    change(gradients)  # type: ignore[operator]
    assert derive(gradients, [reduction]) is None


def test_gradients_added_up_from_two_reductions_are_not_derived() -> None:
    first, output = reduced(random_values())
    second, other = reduced(random_values() * 3 + 1)
    output += other
    assert derive(gradients_of(output), [first, second]) is None


def test_a_rank_whose_gradients_are_in_other_places_has_another_digest() -> None:
    one, output = reduced(random_values())
    other, _ = reduced(random_values())
    gradients = gradients_of(output)
    digests = {
        derived.digest
        for order, reductions in ((gradients, [one]), (gradients[::-1], [one]), (gradients, [other, one]))
        if (derived := derive(order, reductions))
    }
    assert len(digests) == 3
