"""Which of the weights at hand are those of a model, by their names and shapes. Pure.

Files name weights in many ways: as they are, after what a wrapper puts before them (`module.`, `_orig_mod.`), inside of
`state_dict` or `model`, flat or nested. Of these ways the one counts that meets most names of the model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.train.state.keys import own_keys, without_wrappers

_INSIDE = ("state_dict", "model", "model_state_dict", "module")


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """What a source has for a model: values by the model's own keys, and where the two differ, each in a few words."""

    values: dict[str, Any]
    missing: list[str]
    unexpected: list[str]
    misshapen: list[str]

    @property
    def differences(self) -> list[str]:
        """All of them."""
        missing = [f"{key} is missing" for key in self.missing]
        return [*missing, *self.misshapen, *(f"{key} is unexpected" for key in self.unexpected)]


def fit(name: str, model: Mapping[str, Any], content: Mapping[str, Any]) -> Fit:
    """How the weights in this content fit the model of this name and state_dict, read in the way that fits best."""
    keys = dict(zip(own_keys(model), model, strict=True))  # the user's own, and the model's
    best = max(_readings(name, content), key=lambda found: (len(found.keys() & keys.keys()), len(found)))
    misshapen = {key for key in best if key in keys and not _same_shape(best[key], model[keys[key]])}
    return Fit(
        {keys[key]: value for key, value in best.items() if key in keys and key not in misshapen},
        [key for key in keys if key not in best],
        [key for key in best if key not in keys],
        [f"{key} has shape {_shape(best[key])}, not {_shape(model[keys[key]])}" for key in sorted(misshapen)],
    )


def _readings(name: str, content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The ways to read the content as weights by name: the plainest first."""
    inside = dict.fromkeys((name, *_INSIDE))
    flat = {key: value for key, value in content.items() if isinstance(key, str) and not isinstance(value, Mapping)}
    for reading in (flat, *(content[key] for key in inside if isinstance(content.get(key), Mapping))):
        weights = {str(key): value for key, value in reading.items()}
        yield weights
        yield {without_wrappers(key): value for key, value in weights.items()}
        for prefix in inside:
            yield {
                without_wrappers(key.removeprefix(f"{prefix}.")): value
                for key, value in weights.items()
                if key.startswith(f"{prefix}.")
            }


def _same_shape(one: Any, other: Any) -> bool:
    return _shape(one) == _shape(other)


def _shape(value: Any) -> object:
    return list(value.shape) if isinstance(value, torch.Tensor) else f"of a {type(value).__name__}"
