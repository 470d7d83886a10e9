"""Gradients that a rank need not send, because the next rank computes them from reduced gradients and one number.

The next rank already has the reduced gradients of this rank (see operations.py). FSDP2 makes the gradients of parameters
views of them, and clipping multiplies all by the same number. Each rank looks up from which values each of its gradients
came, and compares every bit of it with these values times that number. Gradients that a script has changed otherwise,
added up from several reductions or cast to another dtype are not derived.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash

from holdfast.live.sharded.operations import Reduce, same_bits

SAMPLED = 4096  # values from which the number is found


@dataclass(frozen=True, slots=True, eq=False)
class DerivedGradients:
    """Gradients of this rank as parts of its reduced gradients, `places`, times `factor`."""

    places: tuple[tuple[Reduce, int], ...]  # each with the number of the first value
    factor: float
    digest: int
    """A digest of the places. The next rank can derive the gradients if it has found the same places for its own."""

    def of_previous(self, copies: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the reduced gradients of the previous rank, in the same places, for `copies` of its parameters."""
        return [
            reduction.previous[start : start + copied.numel()].view_as(copied)
            for (reduction, start), copied in zip(self.places, copies, strict=True)
        ]


def derive(gradients: Sequence[torch.Tensor], reductions: Sequence[Reduce]) -> DerivedGradients | None:
    """Return how `gradients` follow from this step's `reductions`; None if they do not, or not for certain."""
    places = _places(gradients, reductions)
    if not places:
        return None
    values = [gradient.detach().cpu().reshape(-1) for gradient in gradients]
    parts = zip(places, values, strict=True)
    factor = common_factor([reductions[n].own[start : start + value.numel()] for (n, start), value in parts], values)
    if factor is None:
        return None
    numbers = [(n, start, str(reductions[n].own.dtype)) for n, start in places]
    digest = xxhash.xxh3_64(repr(numbers).encode()).intdigest() >> 1  # fits into a signed number
    return DerivedGradients(tuple((reductions[n], start) for n, start in places), factor, digest)


def common_factor(originals: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> float | None:
    """Return the number by which all `originals` were multiplied to get `values`, every bit of them; None if there is none."""
    largest = max(range(len(values)), key=lambda number: values[number].numel())
    factor = _sampled_factor(originals[largest], values[largest])
    pairs = zip(originals, values, strict=True)
    if factor is None or not all(same_bits(times(original, factor), value) for original, value in pairs):
        return None
    return factor


def times(values: torch.Tensor, factor: float) -> torch.Tensor:
    """Return `values` times `factor`: the values themselves if it is 1."""
    return values if factor == 1.0 else values * factor


def _places(gradients: Sequence[torch.Tensor], reductions: Sequence[Reduce]) -> list[tuple[int, int]] | None:
    """Return for each gradient the number of the reduction whose result it is a part of, and its first value in it."""
    by_memory = {reduction.memory: number for number, reduction in enumerate(reductions)}
    places = []
    for gradient in gradients:
        number = by_memory.get(gradient.untyped_storage().data_ptr())
        if number is None or gradient.dtype != reductions[number].own.dtype or not gradient.is_contiguous():
            return None
        start = int(gradient.storage_offset()) - reductions[number].start
        if start < 0 or start + gradient.numel() > reductions[number].own.numel():
            return None
        places.append((number, start))
    return places


def _sampled_factor(original: torch.Tensor, values: torch.Tensor) -> float | None:
    """Return the one number of the values' precision that explains a sample of them; if several do, one of these.

    Each product was rounded to the nearest value, so each pair of values bounds the number from below and above."""
    every = max(1, values.numel() // SAMPLED)
    original, values = original[::every].abs(), values[::every].abs()
    if same_bits(original.contiguous(), values.contiguous()):
        return 1.0
    if not values.is_floating_point():
        return None
    is_usable = (original > 0) & original.isfinite() & (values > torch.finfo(values.dtype).tiny) & values.isfinite()
    original, values = original[is_usable].double(), values[is_usable]
    if not values.numel():
        return None
    step = (torch.nextafter(values, torch.full_like(values, torch.inf)) - values).double() / 2
    low, high = ((values.double() - step) / original).max(), ((values.double() + step) / original).min()
    if low > high:
        return None
    middle = (low + high) / 2
    return float(middle if values.dtype == torch.float64 else middle.float())
