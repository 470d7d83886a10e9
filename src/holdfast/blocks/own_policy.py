"""Checkpoint policies from a Python file of the user, whose function `urgency(info, step)` ranks blocks for a save."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from holdfast.blocks.division import Floats
from holdfast.errors import BadInput
from holdfast.own_file import import_file, in_one_line

if TYPE_CHECKING:
    from holdfast.blocks.policy import BlockInfo

FUNCTION = "urgency"


def is_file(ranking: str) -> bool:
    return ranking.endswith(".py")


def own_ranking(path: str) -> str:
    """Check that the user's file `path` has a valid function to rank blocks for saving; return its absolute path."""
    from holdfast.blocks.policy import BlockInfo

    absolute = str(Path(path).absolute())
    _function.cache_clear()  # the file may have changed
    rng, some = np.random.default_rng(0), np.arange(0, 8, 2)
    whole = BlockInfo(rng.random(8), rng.random(8), np.arange(8) % 3, np.arange(1, 9))
    whole.distances[-1] = 0  # a block that did not move since its last save
    part = BlockInfo(whole.distances[some], whole.norms[some], whole.saved_at[some], whole.sizes[some])
    numbers = urgency(absolute, whole, 5)
    if not np.array_equal(numbers[some], urgency(absolute, part, 5)):
        raise BadInput(
            f"{FUNCTION} of {path} gives a block another number if other blocks are absent. Compute each number from the "
            "entries of its own block alone: nodes of a parameter server see only their own blocks."
        )
    return absolute


def urgency(path: str, info: "BlockInfo", step: int) -> Floats:
    """Return how urgent it is to save each block after `step`, computed by the user's function in the file `path`."""
    function = _function(path)
    try:
        with np.errstate(divide="ignore", invalid="ignore"):  # NaN is refused below
            numbers = np.asarray(function(info, step), np.float64)
    except Exception as error:
        raise BadInput(f"{FUNCTION} of {path} failed: {in_one_line(error)}") from error
    if numbers.shape != info.saved_at.shape:
        raise BadInput(f"{FUNCTION} of {path} returns shape {numbers.shape}, not one number for each block.")
    wrong = np.isnan(numbers) & np.isfinite(info.distances) & np.isfinite(info.norms)  # not of a model that diverged
    if wrong.any():
        first = int(wrong.argmax())
        raise BadInput(
            f"{FUNCTION} of {path} returns NaN for a block with distance {info.distances[first]:g} and norm "
            f"{info.norms[first]:g}: return a number for every block. Does it divide 0 by 0?"
        )
    return numbers


@cache
def _function(path: str):  # type: ignore[no-untyped-def]  # the user's own function
    function = getattr(import_file(Path(path)), FUNCTION, None)
    if not callable(function):
        raise BadInput(
            f"{path} has no function {FUNCTION}(info, step): define one that returns a number for each block."
        )
    return function
