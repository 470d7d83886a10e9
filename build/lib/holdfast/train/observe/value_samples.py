"""Samples of a few values of each tensor, to tell cheaply whether state has changed or resembles a model."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from holdfast.train.state.shards import local

VALUES = 16  # of each tensor, spread over it
NEAR = 0.9  # the cosine of the angle between two states above which one counts as an average of the other


def sampled(tensors: Iterable[torch.Tensor]) -> np.ndarray[Any, Any]:
    """Return a few values of each tensor in one array, in the order of the tensors."""
    own = (local(tensor.detach()) for tensor in tensors)  # of a distributed tensor, the part of this rank
    views = [_few(tensor) for tensor in own if tensor.layout == torch.strided and not tensor.is_meta]
    kinds: defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for view in views:
        kinds[view.device, view.dtype].append(view)
    read = {kind: iter(torch.cat(same).double().cpu().numpy()) for kind, same in kinds.items()}
    pieces = [islice(read[view.device, view.dtype], view.shape[0]) for view in views]
    return np.fromiter(chain.from_iterable(pieces), np.float64)


def aligned(tensors: Iterable[torch.Tensor], parameters: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return a tensor of equal shape on this rank for each parameter, and use none of `tensors` twice.

    Return None if there are too few."""
    by_shape: defaultdict[tuple[int, ...], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_shape[_shape_here(tensor)].append(tensor)
    match = []
    for parameter in parameters:
        if not (same := by_shape[_shape_here(parameter)]):
            return None
        match.append(same.pop(0))
    return match


def _shape_here(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(local(tensor.detach()).shape)


def is_near(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Return True if two arrays have nearly the same direction, as the weights of a model and their average do."""
    product = float(np.linalg.norm(one) * np.linalg.norm(other))
    return product > 0 and float(one @ other) > NEAR * product


def _few(tensor: torch.Tensor) -> torch.Tensor:
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    count = min(VALUES, values.numel())
    # By memory, not by index: that works for any dense tensor, whatever its strides.
    return values.as_strided((count,), (values.numel() // max(1, count),))
