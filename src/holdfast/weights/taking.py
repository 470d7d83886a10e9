"""The first weights of a run, taken from its source: by every rank, before the first step, unless a snapshot came back."""

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from holdfast.errors import BadInput
from holdfast.runs.source import Source
from holdfast.train.state.protected import Protected, listed
from holdfast.weights.initial import Given, read
from holdfast.weights.match_names import Fit, fit

logger = logging.getLogger(__name__)


def take(source: Source, protected: Protected, *, tells: bool = False) -> str:
    """Give the protected things their first states, and return the digest of what the source gave.

    `tells`, of one of the ranks, has it say what a partial source left as it was.
    """
    given = read(source)
    if given.digest != source.digest:
        raise BadInput(
            f"{source.place} is not what it was when this run began with it: bring that back, or name another --out."
        )
    names = source.take or tuple(name for name, thing in protected.things.items() if isinstance(thing, nn.Module))
    if not names:
        raise BadInput(f"no model is protected that could take the weights of {source.place}: protect(model=model).")
    for name in names:
        _give(name, _known(name, protected), _content(name, names, given, source), given, source, tells=tells)
    return given.digest


def _known(name: str, protected: Protected) -> Protected:
    """What is protected under this name, by itself."""
    if name not in protected.things:
        raise BadInput(
            f"nothing named {name!r} is protected that could take a state: {', '.join(protected.things)} are."
        )
    return Protected({name: protected.things[name]})


def _content(name: str, names: tuple[str, ...], given: Given, source: Source) -> Mapping[str, Any]:
    """The part of the source that is meant for this thing."""
    content: Mapping[str, Any] = given.content
    if name in content and isinstance(content[name], Mapping):
        return {name: content[name]}
    if len(names) == 1 and not (given.of_a_run and len(content) > 1):
        return content if not given.of_a_run else {name: next(iter(content.values()))}
    has = f"has {', '.join(map(str, content))}" if given.of_a_run else "does not name its models"
    raise BadInput(
        f"{source.place} {has}, and {', '.join(names)} are to take weights from it: say which with --take NAME."
    )


def _give(
    name: str, alone: Protected, content: Mapping[str, Any], given: Given, source: Source, *, tells: bool
) -> None:
    thing = alone.things[name]
    if not isinstance(thing, nn.Module):
        if not given.of_a_run:
            raise BadInput(f"{name} is no model, and only a run has states of others: leave it out of --take.")
        if differences := alone.differences(content):
            raise BadInput(f"{name} cannot take its state from {source.place} ({listed(differences)}).")
        alone.restore(content)
        return
    before = thing.state_dict()
    found = fit(name, before, content)
    if found.differences and not (source.partial and found.values):
        raise BadInput(
            f"the weights in {source.place} are not those of {name} ({listed(found.differences)}): take those of the "
            "same model, or give --partial to begin with what fits."
        )
    thing.load_state_dict({**before, **found.values})
    if found.differences and tells:
        _tell(name, found, source)


def _tell(name: str, found: Fit, source: Source) -> None:
    logger.warning(
        "%s begins with %d of its %d tensors from %s: %s",
        name,
        len(found.values),
        len(found.values) + len(found.missing) + len(found.misshapen),
        source.place,
        listed(found.differences),
    )
