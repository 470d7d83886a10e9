"""An event as a line of a history, and back."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.errors import BadInput
from holdfast.events.common import JSON, Malformed, Other
from holdfast.events.fields import READERS, plain, why
from holdfast.events.kinds import KINDS, What, word
from holdfast.events.steps import read_step, step_line
from holdfast.events.training_run import Step

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
