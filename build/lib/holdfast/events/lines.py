"""Writes an event as a line of a history, and reads it back.

Most lines of a long history are steps, which are written while training waits, so `step_line` writes them faster.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

from holdfast.errors import BadInput
from holdfast.events.any_run import JSON, Malformed, Other
from holdfast.events.fields import KINDS, LONGEST, READERS, What, kind_name, to_plain, why_malformed
from holdfast.events.training_run import Step

_digits = float.__repr__  # as JSON's own encoder writes a number
_quoted = lru_cache(maxsize=16)(json.dumps)


def step_line(time: float, who: str, step: Step) -> bytes | None:
    """Encode a step event as a line of a history file, faster than `line`; return None if only `line` can encode it."""
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
    """One event of a history: its time in seconds since 1970, the name of its writer, and its contents."""

    time: float
    who: str
    what: What

    @property
    def kind(self) -> str:
        return kind_name(self.what)


@cache
def rank_of(who: str) -> int | None:
    """Return the rank in a writer name such as "rank-3", or None if `who` is not the name of a rank."""
    match = re.fullmatch(r"rank-(0|[1-9][0-9]{0,17})", who)
    return int(match[1]) if match else None


def to_json(what: What) -> dict[str, JSON]:
    """Return the fields of an event as JSON values, without fields that have their default value."""
    if isinstance(what, Other | Malformed):
        return dict(what.fields)
    defaults = what._field_defaults
    return {
        name: to_plain(value)
        for name, value in zip(what._fields, what, strict=True)
        if name not in defaults or value != defaults[name]
    }


def from_json(kind: str, data: Mapping[str, JSON]) -> What:
    """Return an event of type `kind` from its fields; `Other` if the type is unknown, `Malformed` for wrong fields."""
    if kind not in KINDS:
        return Other(kind, data)
    known = KINDS[kind]
    try:
        return known(**{name: read(data[name]) for name, read in READERS[known] if name in data})  # type: ignore[no-any-return]
    except (TypeError, ValueError):
        return Malformed(kind, data, why_malformed(known, data))


def line(time: float, who: str, what: What) -> bytes:
    """Encode event `what`, written by the process `who`, as a line of a history file; NaN and infinity become null."""
    if type(what) is Step and (text := step_line(time, who, what)):
        return text
    kind = kind_name(what)
    data = {"event": kind, "time": time, "who": who, **to_json(what)}
    try:
        return _ENCODER.encode(data).encode() + b"\n"
    except ValueError:
        return json.dumps(_finite(data)).encode() + b"\n"
    except TypeError as error:
        raise BadInput(f"the event {kind!r} has fields that are not JSON values: {error}.") from error


def parse(text: bytes) -> Event:
    """Return the event in a line of a history file; raise ValueError with a reason if the line is not an event."""
    data = _decoded(text, _DECODER)
    if not isinstance(data, dict):
        raise ValueError("it is not a JSON object")
    nested = sum(len(part) for part in (data.get("samples"), data.get("seconds")) if type(part) is dict)
    if text.count(b":") != len(data) + nested:  # with as many colons as names, no name is repeated
        _decoded(text, _CAREFUL)
    kind, when, who = data.pop("event", None), data.pop("time", None), data.pop("who", None)
    if not (isinstance(kind, str) and isinstance(who, str)):
        raise ValueError(f"its {'who' if isinstance(kind, str) else 'event'} is not text")
    if type(when) not in (int, float):
        raise ValueError("its time is not a number")
    if not 0 <= when <= LONGEST:
        raise ValueError(f"its time, {when!s:.12}, is not in seconds since 1970")
    try:
        return Event(float(when), who, from_json(kind, data))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _decoded(text: bytes, decoder: json.JSONDecoder) -> Any:
    try:
        return decoder.decode(text.decode())
    except _Refused:
        raise
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON from character {min(error.pos, len(text.rstrip())) + 1} on") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:  # Python limits the digits of a whole number
        raise ValueError("a number in it has too many digits") from None


def _finite(value: Any) -> JSON:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value  # type: ignore[no-any-return]


class _Refused(ValueError):
    """Raised for text that is not strict JSON, such as NaN or a repeated name."""


def _refuse(constant: str) -> None:
    raise _Refused(f"it contains {constant}, which is not JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the (name, value) pairs of a JSON object as a dict; raise _Refused if a name is repeated."""
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Refused(f"it has {next(name for name in names if names.count(name) > 1)!r:.40} twice")
    return data


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_CAREFUL = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_once)
