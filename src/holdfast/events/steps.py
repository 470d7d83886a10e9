"""Steps as lines of a history, written and read in a fraction of the time: a long history is steps.

What comes out is the same as in the general way, which is taken for every step that this one does not cover.
"""

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from holdfast.errors import Corrupt
from holdfast.events.fields import LARGEST
from holdfast.events.training_run import Seconds, Step
from holdfast.sampler.digest import Samples

_INT, _FLOAT = {int}, {float}
_digits = float.__repr__  # as JSON's own encoder writes a number
_quoted = lru_cache(maxsize=16)(json.dumps)


def read_step(said: Mapping[str, Any]) -> Step | None:
    """What `from_json` reads of a step, in half of the time: a long history is steps. None: not in this way."""
    try:
        numbers = (said["attempt"], said["world"], said["rank"], said["epoch"], said["cursor"], said["step"])
        effort = (said.get("reduced", 0), said.get("held", 0), said.get("stepped", 0))
        samples, took = Samples.from_json(said["samples"]), said["seconds"]
        seconds = Seconds(took["data"], took["compute"], took["stall"], took.get("device") is True)
        state, loss = said.get("state"), said.get("loss")
        whole = (*numbers, *effort, samples.count)
        fractions = (*seconds[:3], 0.0 if loss is None else loss)
        if (
            set(map(type, whole)) != _INT
            or min(whole) < 0
            or max(whole) > LARGEST
            or set(map(type, fractions)) != _FLOAT
        ):
            return None
        if not math.isfinite(sum(fractions)) or not (state is None or (type(state) is str and state)):
            return None
        return Step(*numbers, samples, seconds, state, *effort, loss)
    except (KeyError, TypeError, AttributeError, Corrupt):
        return None


def step_line(time: float, who: str, step: Step) -> bytes | None:
    """What `line` makes of a step, in a third of the time: every rank writes one at every step. None: not in this way."""
    attempt, world, rank, epoch, cursor, number, samples, seconds, state, reduced, held, stepped, loss = step
    data, compute, stall, device = seconds
    try:
        # A sum is finite if its parts are, but for those that are too large to be seconds.
        if not math.isfinite(time + data + compute + stall + (loss or 0.0)) or not (state is None or state.isalnum()):
            return None
        rest = ', "device": true}' if device else "}"
        rest += f', "state": "{state}"' if state is not None else ""
        rest += f', "reduced": {reduced:d}' if reduced else ""
        rest += f', "held": {held:d}' if held else ""
        rest += f', "stepped": {stepped:d}' if stepped else ""
        rest += f', "loss": {_digits(loss)}' if loss is not None else ""
        return (
            f'{{"event": "step", "time": {_digits(time)}, "who": {_quoted(who)}, "attempt": {attempt:d}, '
            f'"world": {world:d}, "rank": {rank:d}, "epoch": {epoch:d}, "cursor": {cursor:d}, "step": {number:d}, '
            f'"samples": {{"count": {samples.count:d}, "digest": "{samples.digest}"}}, '
            f'"seconds": {{"data": {_digits(data)}, "compute": {_digits(compute)}, "stall": {_digits(stall)}{rest}}}\n'
        ).encode()
    except (TypeError, ValueError):
        return None
