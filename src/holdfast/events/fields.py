"""The registry of event kinds, and how each field is written as JSON and read back, strictly by its type."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeAlias, get_type_hints

from holdfast.errors import Corrupt
from holdfast.events.common import JSON, Commit, Done, Malformed, Open, Other
from holdfast.events.server_run import (
    Applied,
    Chosen,
    Dropped,
    Iterate,
    Joined,
    Lost,
    Moved,
    Pushed,
    Restored,
    Serve,
    Struck,
)
from holdfast.events.training_run import (
    Attempt,
    Detect,
    Judged,
    Launch,
    Plan,
    Preempt,
    Preempted,
    Recover,
    Regroup,
    Restart,
    Save,
    Scale,
    Seconds,
    Step,
    Stopped,
    Strike,
)
from holdfast.sampler.digest import Samples
from holdfast.stall import Stall

_OfRanks: TypeAlias = Attempt | Plan | Recover | Step | Save | Strike | Preempted | Stopped | Regroup
_OfSupervisors: TypeAlias = Launch | Restart | Detect | Scale | Preempt | Judged
_OfServers: TypeAlias = (
    Serve | Iterate | Pushed | Applied | Chosen | Struck | Lost | Restored | Dropped | Joined | Moved
)
What: TypeAlias = Open | Commit | Done | _OfRanks | _OfSupervisors | _OfServers | Other | Malformed
KINDS: Mapping[str, type[Any]] = {
    "open": Open,
    "attempt": Attempt,
    "plan": Plan,
    "recover": Recover,
    "step": Step,
    "save": Save,
    "commit": Commit,
    "failure": Strike,
    "done": Done,
    "preempted": Preempted,
    "stopped": Stopped,
    "regroup": Regroup,
    "launch": Launch,
    "restart": Restart,
    "detect": Detect,
    "scale": Scale,
    "preempt": Preempt,
    "verdict": Judged,
    "serve": Serve,
    "iterate": Iterate,
    "pushed": Pushed,
    "applied": Applied,
    "chosen": Chosen,
    "struck": Struck,
    "lost": Lost,
    "restored": Restored,
    "dropped": Dropped,
    "joined": Joined,
    "moved": Moved,
}
_KIND_NAMES = {kind: name for name, kind in KINDS.items()}


def kind_name(what: What) -> str:
    """Return the name of the kind of an event in a history."""
    return what.kind if isinstance(what, Other | Malformed) else _KIND_NAMES[type(what)]


LARGEST = (1 << 63) - 1


def to_plain(value: Any) -> JSON:
    """Return the value of a field as JSON."""
    if isinstance(value, Samples):
        return value.to_json()
    if isinstance(value, Seconds):
        return {name: part for name, part in value._asdict().items() if part is not False}
    if isinstance(value, Stall):
        return asdict(value)
    return value  # type: ignore[no-any-return]


def _whole(value: JSON) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise ValueError(f"{_shown(value)} is not a whole number from 0 to 2^63 - 1")
    return value


def _seed(value: JSON) -> int:
    return _whole(value) if type(value) is not int or value <= LARGEST else LARGEST + 1 + _whole(value - LARGEST - 1)


def _integer(value: JSON) -> int:
    if type(value) is not int or abs(value) > LARGEST:
        raise ValueError(f"{_shown(value)} is not a whole number below 2^63")
    return value


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


def _text(value: JSON) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{_shown(value)} is not text")
    return value


def _digest(value: JSON) -> str:
    if not (text := _text(value)):
        raise ValueError("it is empty")
    return text


def _flag(value: JSON) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{_shown(value)} is neither true nor false")
    return value


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
    parts = {part.name: _part(given, part.name) for part in fields(Stall) if part.name in given}
    if negative := next((name for name, value in parts.items() if value < 0), None):
        raise ValueError(f"{negative}: {_shown(given[negative])} is below 0")
    return Stall(**parts)


def _part(parts: Mapping[str, JSON], name: str) -> float:
    if name not in parts:
        raise ValueError(f"{name} is missing")
    try:
        return _number(parts[name])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _object(value: JSON) -> Mapping[str, JSON]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{_shown(value)} is not a JSON object")
    return value


def _texts(value: JSON) -> Sequence[str]:
    return tuple(_text(item) for item in _list(value))


def _wholes(value: JSON) -> Sequence[int]:
    return tuple(_whole(item) for item in _list(value))


def _objects(value: JSON) -> Sequence[Mapping[str, JSON]]:
    return tuple(_object(item) for item in _list(value))


def _list(value: JSON) -> Sequence[JSON]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{_shown(value)} is not a list")
    return value


_Read: TypeAlias = Callable[[Any], Any]
_BY_TYPE: Mapping[Any, _Read] = {
    int: _whole,
    float: _number,
    str: _text,
    bool: _flag,
    Samples: _samples,
    Seconds: _seconds,
    Stall: _stall,
    Sequence[str]: _texts,
    Sequence[int]: _wholes,
    Sequence[Mapping[str, JSON]]: _objects,
}
# A seed has 64 bits; ranks of other nodes are -1, and an exit status is minus the signal that killed.
_BY_NAME: Mapping[tuple[type[Any], str], _Read] = {
    (Attempt, "seed"): _seed,
    (Plan, "seed"): _seed,
    (Serve, "seed"): _seed,
    (Recover, "passed_over"): _objects,
    (Detect, "rank"): _integer,
    (Detect, "local_rank"): _integer,
    (Detect, "exit"): _integer,
}


_DIGESTS = ("state", "fingerprint", "data", "config", "command", "weights")


def _reader(kind: type[Any], name: str, hint: Any) -> _Read:
    optional = type(None) in getattr(hint, "__args__", ())
    if optional:
        (hint,) = (part for part in hint.__args__ if part is not type(None))
    read = _BY_NAME.get((kind, name)) or (_digest if name in _DIGESTS else _BY_TYPE[hint])
    return (lambda value: None if value is None else read(value)) if optional else read


def _readers(kind: type[Any]) -> tuple[tuple[str, _Read], ...]:
    hints = get_type_hints(kind, localns={"JSON": JSON})
    return tuple((name, _reader(kind, name, hints[name])) for name in kind._fields)


# The functions that read the fields of each kind.
READERS = {kind: _readers(kind) for kind in KINDS.values()}


def why_malformed(kind: type[Any], data: Mapping[str, JSON]) -> str:
    """Return which fields of an event are missing, or which one is wrong and why."""
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
