"""An event as a line of a history, and back.

Steps as lines of a history, written and read in a fraction of the time: a long history is steps.

What comes out is the same as in the general way, which is taken for every step that this one does not cover.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from holdfast.errors import BadInput, Corrupt
from holdfast.events.common import JSON, Malformed, Other
from holdfast.events.fields import KINDS, LARGEST, READERS, What, plain, why, word
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


_ENCODER = json.JSONEncoder(allow_nan=False)


class Event(NamedTuple):
    """One thing that happened: when, who wrote it, and what it was."""

    time: float
    who: str
    what: What

    @property
    def kind(self) -> str:
        """The word that names its kind in a history."""
        return word(self.what)


def to_json(what: What) -> dict[str, JSON]:
    """The fields of an event as JSON values, without those that have their default."""
    if isinstance(what, Other | Malformed):
        return dict(what.fields)
    defaults = what._field_defaults
    return {
        name: plain(value)
        for name, value in zip(what._fields, what, strict=True)
        if name not in defaults or value != defaults[name]
    }


def from_json(kind: str, said: Mapping[str, JSON]) -> What:
    """The event of this kind with these fields; whatever they are, this does not raise."""
    if kind not in KINDS:
        return Other(kind, said)
    known = KINDS[kind]
    if known is Step and (step := read_step(said)):
        return step
    try:
        return known(**{name: read(said[name]) for name, read in READERS[known] if name in said})  # type: ignore[no-any-return]
    except (TypeError, ValueError):
        return Malformed(kind, said, why(known, said))


def line(time: float, who: str, what: What) -> bytes:
    """An event as a line of a history; a number that is not finite is written as null, which JSON has."""
    if type(what) is Step and (text := step_line(time, who, what)):
        return text
    kind = word(what)
    said = {"event": kind, "time": time, "who": who, **to_json(what)}
    try:
        return _ENCODER.encode(said).encode() + b"\n"
    except ValueError:
        return json.dumps(_finite(said)).encode() + b"\n"
    except TypeError as error:
        raise BadInput(f"the event {kind!r} does not consist of JSON values: {error}.") from error


def parse(text: bytes) -> Event:
    """The event in a line; ValueError if it is none, which says why in a few words."""
    said = _decoded(text, _DECODER)
    if not isinstance(said, dict):
        raise ValueError("it is no JSON object")
    if text.count(b":") != _names(said):  # as many colons as names: none stands there twice. Else it is to be seen
        _decoded(text, _CAREFUL)
    kind, when, who = said.pop("event", None), said.pop("time", None), said.pop("who", None)
    if not (isinstance(kind, str) and isinstance(who, str)):
        raise ValueError(f"its {'who' if isinstance(kind, str) else 'event'} is no text")
    if type(when) not in (int, float):
        raise ValueError("its time is no number")
    try:
        return Event(float(when), who, from_json(kind, said))
    except OverflowError:
        raise ValueError("its time is no number that can be one of seconds") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _decoded(text: bytes, decoder: json.JSONDecoder) -> Any:
    try:
        return decoder.decode(text.decode())
    except _Refused:
        raise
    except UnicodeDecodeError:
        raise ValueError("it is no text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON from character {min(error.pos, len(text.rstrip())) + 1} on") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:  # Python reads no whole number of more digits
        raise ValueError("a number in it has too many digits") from None


def _names(said: Mapping[str, Any]) -> int:
    """How many names a line has, if only those of its parts have names of their own that have them in a step."""
    samples, seconds = said.get("samples"), said.get("seconds")
    within = (len(samples) if type(samples) is dict else 0) + (len(seconds) if type(seconds) is dict else 0)
    return len(said) + within


def _finite(value: Any) -> JSON:
    """The value with null for NaN and infinity, which JSON lacks and a loss that diverges has."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value  # type: ignore[no-any-return]


class _Refused(ValueError):
    """What other readers of JSON may take, and we do not."""


def _refuse(constant: str) -> None:
    raise _Refused(f"it says {constant}, which JSON does not have")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which every name stands once: readers differ in which of two they take."""
    said = dict(pairs)
    if len(said) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Refused(f"it says {next(name for name in names if names.count(name) > 1)!r:.40} twice")
    return said


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_CAREFUL = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_once)
