"""Checkpoint policies from a Python file of the user, whose function `urgency(info, step)` ranks blocks for a save."""

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Floats
from holdfast.errors import BadInput
from holdfast.own_file import import_file, in_one_line

if TYPE_CHECKING:
    from holdfast.blocks.policy import BlockInfo

FUNCTION = "urgency"


def is_file(ranking: str) -> bool:
    return ranking.endswith(".py")


def own_rankings(paths: Iterable[str]) -> tuple[str, ...]:
    """Check the user's policy files `paths`; return their absolute paths. Two files must not have the same name."""
    files: dict[str, str] = {}
    for path in paths:
        name = Path(path).name
        if name in files:
            raise BadInput(
                f"Two policies are called {name}: {files[name]} and {path}. Results name a policy by its file: rename one "
                "file, or leave one out."
            )
        files[name] = path
    return tuple(map(own_ranking, files.values()))


def defines_policy(path: str) -> bool:
    """Return True if `path` is a Python file of the user that defines a policy, and no workload."""
    if not is_file(path):  # the name of a built-in workload
        return False
    module = import_file(Path(path))
    return hasattr(module, FUNCTION) and not hasattr(module, "workload")


def own_ranking(path: str) -> str:
    """Check that the user's file `path` has a valid function to rank blocks for saving; return its absolute path."""
    from holdfast.blocks.policy import BlockInfo

    absolute = str(Path(path).absolute())
    _function.cache_clear()  # the file may have changed
    rng, some = np.random.default_rng(0), np.arange(0, 8, 2)
    whole = BlockInfo(rng.random(8), rng.random(8), np.arange(8) % 3, np.arange(1, 9))
    whole.distances[-1] = 0  # a block that did not move since its last save
    part = _of_blocks(whole, some)
    numbers = urgency(absolute, whole, 5)
    if not np.array_equal(numbers[some], urgency(absolute, part, 5)):
        raise BadInput(
            f"{FUNCTION} of {path} gives a block another number if other blocks are absent. Compute each number from the "
            "entries of its own block alone: nodes of a parameter server see only their own blocks."
        )
    return absolute


def urgency(path: str, info: "BlockInfo", step: int) -> Floats:
    """Return how urgent it is to save each block after `step`, computed by the user's function in the file `path`."""
    try:
        with np.errstate(divide="ignore", invalid="ignore"):  # NaN is refused below
            numbers = np.asarray(_call(path, info, step), np.float64)
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"{FUNCTION} of {path} failed: {in_one_line(error)}") from error
    if numbers.shape != info.saved_at.shape:
        raise BadInput(f"{FUNCTION} of {path} returns shape {numbers.shape}, not one number for each block.")
    wrong = np.isnan(numbers) & np.isfinite(info.distances) & np.isfinite(info.norms)  # not of a model that diverged
    if wrong.any():
        raise BadInput(_nan_error(path, _of_blocks(info, np.flatnonzero(wrong)[:1]), step))
    return numbers


def _nan_error(path: str, block: "BlockInfo", step: int) -> str:
    message = (
        f"{FUNCTION} of {path} returns NaN for a block with distance {block.distances[0]:g} and norm {block.norms[0]:g} at "
        f"step {step}: return a number for every block."
    )
    try:
        with np.errstate(invalid="raise"):
            _call(path, block, step)
    except FloatingPointError as error:
        divides = " Does it divide 0 by 0?" if "divide" in str(error) else ""
        return f"{message} numpy reports: {error}.{divides}"
    except Exception:  # the function fails for a single block; the message says what it does for all
        return message
    return message


def _call(path: str, info: "BlockInfo", step: int) -> Any:
    """Call the user's function with arrays that it cannot change."""
    return _function(path)(_with_each(info, _read_only), step)


def _of_blocks(info: "BlockInfo", ids: npt.NDArray[np.int64]) -> "BlockInfo":
    return _with_each(info, lambda array: array[ids])


def _with_each(info: "BlockInfo", change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> "BlockInfo":
    return replace(info, **{field.name: change(getattr(info, field.name)) for field in fields(info)})


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


@cache
def _function(path: str):  # type: ignore[no-untyped-def]  # the user's own function
    function = getattr(import_file(Path(path)), FUNCTION, None)
    if not callable(function):
        raise BadInput(
            f"{path} has no function {FUNCTION}(info, step): define one that returns a number for each block."
        )
    return function
