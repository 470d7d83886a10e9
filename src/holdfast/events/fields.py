"""The registry of event kinds, and the conversion of each field to and from JSON, strictly by its type."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeAlias, get_args, get_type_hints

from holdfast.errors import Corrupt
from holdfast.events.any_run import JSON, Commit, Done, Malformed, Open, Other
from holdfast.events.server_run import ServerEvent
from holdfast.events.training_run import Detect, Judged, Seconds, Strike, TrainingEvent
from holdfast.sampler.digest import Samples
from holdfast.stall import STALL_TIMES, Stall

What: TypeAlias = Open | Commit | Done | TrainingEvent | ServerEvent | Other | Malformed
_RENAMED: Mapping[type[Any], str] = {Strike: "failure", Judged: "verdict"}  # other kinds have the name of their class
_KIND_NAMES: Mapping[type[Any], str] = {
    kind: _RENAMED.get(kind, kind.__name__.lower()) for kind in get_args(What) if kind not in (Other, Malformed)
}
KINDS: Mapping[str, type[Any]] = {name: kind for kind, name in _KIND_NAMES.items()}
LARGEST = (1 << 63) - 1
LONGEST = 1e11  # the largest time of an event, and the longest duration, in seconds: more than 3,000 years


def kind_name(what: What) -> str:
    """Return the name of the kind of the event `what` in history files, such as "step"."""
    return what.kind if isinstance(what, Other | Malformed) else _KIND_NAMES[type(what)]


def to_plain(value: Any) -> JSON:
    if isinstance(value, Samples):
        return value.to_json()
    if isinstance(value, Seconds):
        return {name: part for name, part in value._asdict().items() if part is not False}
    if isinstance(value, Stall):
        return asdict(value)
    return value  # type: ignore[no-any-return]


_Read: TypeAlias = Callable[[Any], Any]


def _integer(lowest: int, largest: int, name: str) -> _Read:
    def read(value: JSON) -> int:
        if type(value) is not int or not lowest <= value <= largest:
            raise ValueError(f"{_shown(value)} is not a whole number {name}")
        return value

    return read


def _instance(kind: type[Any], error: str) -> _Read:
    def read(value: JSON) -> Any:
        if not isinstance(value, kind):
            raise ValueError(f"{_shown(value)} is {error}")
        return value

    return read


def _list_of(read_item: _Read) -> _Read:
    def read(value: JSON) -> Sequence[JSON]:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{_shown(value)} is not a list")
        return tuple(read_item(item) for item in value)

    return read


_whole = _integer(0, LARGEST, "from 0 to 2^63 - 1")
_text = _instance(str, "not text")
_object = _instance(Mapping, "not a JSON object")


def _number(value: JSON) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{_shown(value)} is not a number")
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise ValueError(f"{_shown(value)} is too large") from None
    if not math.isfinite(number):
        raise ValueError(f"{_shown(value)} is not finite")
    return number


def _duration(value: JSON) -> float:
    if abs(seconds := _number(value)) > LONGEST:
        raise ValueError(f"{_shown(value)} is too large for seconds")
    return seconds


def _digest(value: JSON) -> str:
    if value == "":
        raise ValueError("it is empty")
    return _text(value)  # type: ignore[no-any-return]


def _samples(value: JSON) -> Samples:
    try:
        samples = Samples.from_json(value)
    except Corrupt:
        wanted = "object with a count from 0 and a digest of 32 hexadecimal digits"
        raise ValueError(f"{_shown(value)} is not an {wanted}") from None
    _whole(samples.count)
    return samples


def _seconds(value: JSON) -> Seconds:
    parts = _object(value)
    data, compute, stall = (_part(parts, name) for name in ("data", "compute", "stall"))
    return Seconds(data, compute, stall, device=parts.get("device") is True)


def _stall(value: JSON) -> Stall:
    given = _object(value)
    parts = {name: _part(given, name) for name in STALL_TIMES if name in given}
    if negative := next((name for name, value in parts.items() if value < 0), None):
        raise ValueError(f"{negative}: {_shown(given[negative])} is below 0")
    return Stall(**parts)


def _part(parts: Mapping[str, JSON], name: str) -> float:
    if name not in parts:
        raise ValueError(f"{name} is missing")
    try:
        return _duration(parts[name])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


_seed = _integer(0, (1 << 64) - 1, "from 0 to 2^64 - 1")
_PHASE: Mapping[str, _Read] = {"samples": _whole, "batch": _whole, "epochs": _whole, "seed": _seed}


def _phase(value: JSON) -> Mapping[str, JSON]:
    phase = _object(value)
    if missing := [name for name in _PHASE if name not in phase]:
        raise ValueError(f"{', '.join(missing)} of a phase is missing")
    if phase.get("limit") is not None:
        _whole(phase["limit"])
    return {**phase, **{name: read(phase[name]) for name, read in _PHASE.items()}}


# A seed has 64 bits; ranks of other nodes are -1, and an exit status is minus the signal that killed.
_BY_NAME: Mapping[str, _Read] = {
    "seed": _seed,
    "passed_over": _list_of(_object),
    "later_phases": _list_of(_phase),
    **dict.fromkeys(("parameters", "moments"), _list_of(_object)),
    **dict.fromkeys(("loss", "criterion", "size"), _number),
    **dict.fromkeys(("state", "fingerprint", "data", "config", "command", "weights", "sampler"), _digest),
}
_OF_DETECT = dict.fromkeys(("rank", "local_rank", "exit"), _integer(-LARGEST, LARGEST, "below 2^63"))
_BY_TYPE: Mapping[Any, _Read] = {
    int: _whole,
    float: _duration,
    str: _text,
    bool: _instance(bool, "neither true nor false"),
    Samples: _samples,
    Seconds: _seconds,
    Stall: _stall,
    Sequence[str]: _list_of(_text),
    Sequence[int]: _list_of(_whole),
}


def _readers(kind: type[Any]) -> Iterator[tuple[str, _Read]]:
    by_name = {**_BY_NAME, **_OF_DETECT} if kind is Detect else _BY_NAME
    for name, hint in get_type_hints(kind, localns={"JSON": JSON}).items():
        types = [part for part in getattr(hint, "__args__", ()) if part is not type(None)]
        is_optional = type(None) in getattr(hint, "__args__", ())
        read = by_name.get(name) or _BY_TYPE[types[0] if is_optional else hint]
        yield name, partial(_optional, read) if is_optional else read


def _optional(read: _Read, value: JSON) -> Any:
    return None if value is None else read(value)


READERS = {kind: tuple(_readers(kind)) for kind in KINDS.values()}


def why_malformed(kind: type[Any], data: Mapping[str, JSON]) -> str:
    """Return why `data` is not an event of `kind`: the missing fields, or else the first wrong field."""
    if missing := [name for name in kind._fields if name not in data and name not in kind._field_defaults]:
        return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
    for name, read in READERS[kind]:
        try:
            if name in data:
                read(data[name])
        except ValueError as error:
            return f"its {name} is wrong ({error})"
    return "its fields are not those of its kind"


def _shown(value: JSON) -> str:
    return f"{json.dumps(value, default=str, skipkeys=True):.40}"
