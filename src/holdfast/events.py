"""What happened, as typed values: a class for each kind of event, how it is written as JSON, and how it is read back.

This file is the format of a history. A line is one JSON object: `event` names the kind, `time` and `who` say when and
by whom it was written, and the other fields are those of the kind's class. A field that has a default is left out when
it has that value. Readers keep kinds that they do not know (`Other`) and events that lack what their kind must say
(`Malformed`), so every line of a sound file is an event; the version rises when a field that exists changes its meaning
or when a new one must be there.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, get_type_hints

from holdfast.errors import BadInput, Corrupt
from holdfast.samples import Samples
from holdfast.stall import Stall

VERSION = 2
JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"


# Tuples: a long run has a step for every rank and window, and a tuple is small and quickly made.
class Open(NamedTuple):
    """A writer has opened its file: the format it writes, and how many bytes of a torn line it cut off."""

    version: int
    torn: int = 0


class Attempt(NamedTuple):
    """A rank has begun an attempt."""

    attempt: int
    world: int
    rank: int
    pid: int


class Plan(NamedTuple):
    """What a rank is to train: so many samples, in which order, saved how; `data` is a digest of a few of them."""

    attempt: int
    samples: int
    batch: int
    epochs: int
    seed: int
    save_every: int
    writer: str
    config: str
    data: str | None = None


class Recover(NamedTuple):
    """What a rank begins with: the snapshot of step `restored`, or nothing (null), and the window it goes on with.

    `state` is a digest of what is protected, as it is in memory when the first step begins, and `fingerprint` is the
    fingerprint of that: of the step before, as whoever trained it told.
    """

    attempt: int
    restored: int | None
    epoch: int
    cursor: int
    rng: str
    seconds: float
    passed_over: "Sequence[Mapping[str, JSON]]" = ()
    state: str | None = None
    fingerprint: str | None = None


class Seconds(NamedTuple):
    """What a step took: waiting for its data, training, and before that waiting for a save.

    `compute` is measured on the device where there is one (`device`), else it is what the process took.
    """

    data: float
    compute: float
    stall: float
    device: bool = False


class Step(NamedTuple):
    """A rank has trained its share of a window.

    `state` is a fingerprint of the state that came out: its first half of what all ranks share, its second of what is a
    rank's own. Of the replicated models, `reduced` backward passes were summed over the ranks and `held` were kept
    back; optimizers took `stepped` steps.
    """

    attempt: int
    world: int
    rank: int
    epoch: int
    cursor: int
    step: int
    samples: Samples
    seconds: Seconds
    state: str | None = None
    reduced: int = 0
    held: int = 0
    stepped: int = 0
    loss: float | None = None


class Save(NamedTuple):
    """What a save cost: how long training waited, for what, and how often the storage had to be asked again."""

    attempt: int
    step: int
    writer: str
    bytes: int
    seconds: Stall
    retries: int = 0


class Commit(NamedTuple):
    """The snapshot of a step exists; if `found`, since before this attempt. `state` is a digest of what it holds.

    Of a served run these blocks are in the running checkpoint as they were after so many iterations.
    """

    attempt: int
    step: int
    bytes: int
    seconds: float | None = None
    found: bool = False
    state: str | None = None
    blocks: Sequence[int] = ()


class Strike(NamedTuple):
    """A failure of the schedule is about to strike."""

    attempt: int
    step: int
    kind: str
    rank: int
    point: str = "boundary"


class Done(NamedTuple):
    """A rank has nothing left to train."""

    attempt: int
    step: int


class Preempted(NamedTuple):
    """A rank was asked to stop, and did so in order."""

    attempt: int
    step: int


class Regroup(NamedTuple):
    """Members were lost or joined, and those that are there go on together, each as it stood.

    `members` are those of membership `number`; windows from `step` on, or the one after it, are divided among them. The
    samples in `missing` had no part, or not in every bucket, in what came out of window `step`, and are not trained
    again. Of its buckets `kept` were summed with the lost ones' gradients, and `redone` without. Members in `behind`
    took over the parameters of one that was further. Those in `asleep` left in order, at the boundary before `step`.
    """

    attempt: int
    number: int
    step: int
    strategy: str
    members: Sequence[int]
    lost: Sequence[int] = ()
    missing: Sequence[int] = ()
    kept: int = 0
    redone: int = 0
    behind: Sequence[int] = ()
    seconds: float = 0.0
    asleep: Sequence[int] = ()


class Launch(NamedTuple):
    """A supervisor has started the workers of its node, one of so many, for the first time."""

    attempt: int
    workers: int
    argv: Sequence[str] = ()
    nodes: int = 1


class Restart(NamedTuple):
    """A supervisor has started the workers of its node again; `newest` is the newest snapshot it saw."""

    attempt: int
    workers: int
    newest: int | None = None
    left: int = 0


class Detect(NamedTuple):
    """A supervisor has seen a worker fail, and of what; a rank of -1 is on another node."""

    attempt: int
    rank: int
    local_rank: int
    kind: str
    message: str
    exit: int | None = None
    signal: str | None = None
    step: int | None = None


class Scale(NamedTuple):
    """A supervisor was asked to have so many workers train, and they do, in membership `number`; the others sleep."""

    attempt: int
    workers: int
    number: int
    seconds: float = 0.0


class Preempt(NamedTuple):
    """A supervisor was asked to stop, and has told its workers."""

    attempt: int


class Judged(NamedTuple):
    """How a supervisor says that the run ended."""

    verdict: str
    attempts: int
    because: str


class Serve(NamedTuple):
    """A controller of a parameter server has begun, or begun again, to train a workload.

    It ends once the loss is below `criterion`, or after so many `iterations`.
    """

    attempt: int
    workload: str
    blocks: int
    nodes: int
    workers: int
    rounds: int
    policy: str
    fraction: str
    interval: int
    recovery: str
    seed: int
    staleness: int
    criterion: float
    iterations: int


class Iterate(NamedTuple):
    """A served iteration is done: its loss, and the seconds of the slowest worker or node in each part of it."""

    iteration: int
    loss: float | None
    seconds: float
    pull: float
    compute: float
    push: float
    apply: float
    checkpoint: float


class Pushed(NamedTuple):
    """A worker has pushed what it computed in a round from a part of the input, by the map of a version, to these nodes."""

    iteration: int
    round: int
    part: int
    version: int
    blocks: Samples
    nodes: Sequence[int]


class Applied(NamedTuple):
    """A node has applied a round to its blocks: what was pushed from these parts of the input, once each.

    `again` counts the pushes that came for this round and were not applied, because they were repeated.
    """

    iteration: int
    round: int
    version: int
    blocks: Samples
    parts: Sequence[int]
    again: int = 0


class Chosen(NamedTuple):
    """Blocks were chosen to be saved as they are once an iteration is done; a node tells of its own, a controller of all."""

    iteration: int
    blocks: Samples
    bytes: int
    seconds: float


class Struck(NamedTuple):
    """Members of a served run are about to be killed on purpose: at the beginning of an iteration, or at another point."""

    iteration: int
    kind: str
    targets: Sequence[int]
    point: str = "boundary"


class Lost(NamedTuple):
    """A node, worker or controller is lost, and why; of a node the blocks, and the round that they waited for."""

    iteration: int
    round: int
    kind: str
    number: int
    why: str
    blocks: Sequence[int] = ()
    version: int = 0


class Restored(NamedTuple):
    """Blocks came back from the running checkpoint to a node, each from the save of an iteration, under a new map.

    `size` is how far they had moved since, as far as it is known.
    """

    iteration: int
    round: int
    node: int
    version: int
    blocks: Sequence[int]
    saved_at: Sequence[int]
    seconds: float
    size: float | None = None


class Dropped(NamedTuple):
    """What was pushed in a round for blocks that were lost before, or while, it was applied: it is not made up for."""

    iteration: int
    round: int
    parts: Sequence[int]
    blocks: Samples


class Joined(NamedTuple):
    """A node or worker has joined a served run, which goes by this version of the map from now on."""

    iteration: int
    kind: str
    number: int
    version: int


class Moved(NamedTuple):
    """Blocks went from one node to another, as they were."""

    iteration: int
    source: int
    target: int
    version: int
    blocks: Sequence[int]


class Other(NamedTuple):
    """An event of a kind that this holdfast does not know."""

    kind: str
    fields: Mapping[str, JSON]


class Malformed(NamedTuple):
    """An event that lacks something that its kind must say, or says it in another form."""

    kind: str
    fields: Mapping[str, JSON]
    why: str


What: TypeAlias = (
    Open
    | Attempt
    | Plan
    | Recover
    | Step
    | Save
    | Commit
    | Strike
    | Done
    | Preempted
    | Regroup
    | Launch
    | Restart
    | Detect
    | Scale
    | Preempt
    | Judged
    | Serve
    | Iterate
    | Pushed
    | Applied
    | Chosen
    | Struck
    | Lost
    | Restored
    | Dropped
    | Joined
    | Moved
    | Other
    | Malformed
)
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
_WORDS = {kind: word for word, kind in KINDS.items()}
_LARGEST = (1 << 63) - 1
_INT, _FLOAT = {int}, {float}
_ENCODER = json.JSONEncoder(allow_nan=False)
_digits = float.__repr__  # as JSON's own encoder writes a number
_quoted = lru_cache(maxsize=16)(json.dumps)


class Event(NamedTuple):
    """One thing that happened: when, who wrote it, and what it was."""

    time: float
    who: str
    what: What

    @property
    def kind(self) -> str:
        """The word that names its kind in a history."""
        what = self.what
        return what.kind if isinstance(what, Other | Malformed) else _WORDS[type(what)]


def to_json(what: What) -> dict[str, JSON]:
    """The fields of an event as JSON values, without those that have their default."""
    if isinstance(what, Other | Malformed):
        return dict(what.fields)
    defaults = what._field_defaults
    return {
        name: _plain(value)
        for name, value in zip(what._fields, what, strict=True)
        if name not in defaults or value != defaults[name]
    }


def from_json(kind: str, said: Mapping[str, JSON]) -> What:
    """The event of this kind with these fields; whatever they are, this does not raise."""
    if kind not in KINDS:
        return Other(kind, said)
    known = KINDS[kind]
    if known is Step and (step := _step(said)):
        return step
    try:
        return known(**{name: read(said[name]) for name, read in _READERS[known] if name in said})  # type: ignore[no-any-return]
    except (TypeError, ValueError, OverflowError, Corrupt, BadInput) as error:
        return Malformed(kind, said, _why(known, said, error))


def line(time: float, who: str, what: What) -> bytes:
    """An event as a line of a history; a number that is not finite is written as null, which JSON has."""
    if type(what) is Step and (text := _step_line(time, who, what)):
        return text
    kind = what.kind if isinstance(what, Other | Malformed) else _WORDS[type(what)]
    said = {"event": kind, "time": time, "who": who, **to_json(what)}
    try:
        return _ENCODER.encode(said).encode() + b"\n"
    except ValueError:
        return json.dumps(_finite(said)).encode() + b"\n"
    except TypeError as error:
        raise BadInput(f"the event {kind!r} does not consist of JSON values: {error}.") from error


def parse(text: bytes) -> Event:
    """The event in a line; ValueError if it is none."""
    said = _DECODER.decode(text.decode())
    if not isinstance(said, dict):
        raise ValueError("not a JSON object")
    if text.count(b":") != _names(said):  # as many colons as names: none stands there twice. Else it is to be seen
        _CAREFUL.decode(text.decode())
    kind, when, who = said.pop("event", None), said.pop("time", None), said.pop("who", None)
    if not (isinstance(kind, str) and isinstance(who, str) and type(when) in (int, float)):
        raise ValueError("event, time or who is missing or of another type")
    return Event(float(when), who, from_json(kind, said))


def _names(said: Mapping[str, Any]) -> int:
    """How many names a line has, if only those of its parts have names of their own that have them in a step."""
    samples, seconds = said.get("samples"), said.get("seconds")
    within = (len(samples) if type(samples) is dict else 0) + (len(seconds) if type(seconds) is dict else 0)
    return len(said) + within


def _step(said: Mapping[str, Any]) -> Step | None:
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
            or max(whole) > _LARGEST
            or set(map(type, fractions)) != _FLOAT
        ):
            return None
        if not math.isfinite(sum(fractions)) or not (state is None or (type(state) is str and state)):
            return None
        return Step(*numbers, samples, seconds, state, *effort, loss)
    except (KeyError, TypeError, AttributeError, Corrupt):
        return None


def _step_line(time: float, who: str, step: Step) -> bytes | None:
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


def _plain(value: Any) -> JSON:
    if isinstance(value, Samples):
        return value.to_json()
    if isinstance(value, Seconds):
        return {name: part for name, part in value._asdict().items() if part is not False}
    if isinstance(value, Stall):
        return asdict(value)
    return value  # type: ignore[no-any-return]


def _whole(value: JSON) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError(f"{value!r:.40} is no whole number from 0 to 2^63 - 1")
    return value


def _seed(value: JSON) -> int:
    return _whole(value) if type(value) is not int or value <= _LARGEST else _LARGEST + 1 + _whole(value - _LARGEST - 1)


def _integer(value: JSON) -> int:
    if type(value) is not int or abs(value) > _LARGEST:
        raise ValueError(f"{value!r:.40} is no whole number below 2^63")
    return value


def _number(value: JSON) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!r:.40} is no number")
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError(f"{value!r:.40} is not finite")
    return number


def _text(value: JSON) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is no text")
    return value


def _digest(value: JSON) -> str:
    if not (text := _text(value)):
        raise ValueError("it is empty")
    return text


def _flag(value: JSON) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{value!r:.40} is neither true nor false")
    return value


def _samples(value: JSON) -> Samples:
    samples = Samples.from_json(value)
    _whole(samples.count)
    return samples


def _seconds(value: JSON) -> Seconds:
    said = _object(value)
    data, compute, stall = (_number(said.get(part)) for part in ("data", "compute", "stall"))
    return Seconds(data, compute, stall, device=said.get("device") is True)


def _stall(value: JSON) -> Stall:
    said = _object(value)
    return Stall(**{part.name: _number(said.get(part.name, 0.0)) for part in fields(Stall)})


def _object(value: JSON) -> Mapping[str, JSON]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r:.40} is no JSON object")
    return value


def _texts(value: JSON) -> Sequence[str]:
    return tuple(_text(item) for item in _list(value))


def _wholes(value: JSON) -> Sequence[int]:
    return tuple(_whole(item) for item in _list(value))


def _objects(value: JSON) -> Sequence[Mapping[str, JSON]]:
    return tuple(_object(item) for item in _list(value))


def _list(value: JSON) -> Sequence[JSON]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{value!r:.40} is no list")
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
_OTHERWISE: Mapping[tuple[type[Any], str], _Read] = {
    (Plan, "seed"): _seed,
    (Serve, "seed"): _seed,
    (Recover, "passed_over"): _objects,
    (Detect, "rank"): _integer,
    (Detect, "local_rank"): _integer,
    (Detect, "exit"): _integer,
}


_DIGESTS = ("state", "fingerprint", "data", "config")


def _reader(kind: type[Any], name: str, hint: Any) -> _Read:
    optional = type(None) in getattr(hint, "__args__", ())
    if optional:
        (hint,) = (part for part in hint.__args__ if part is not type(None))
    read = _OTHERWISE.get((kind, name)) or (_digest if name in _DIGESTS else _BY_TYPE[hint])
    return (lambda value: None if value is None else read(value)) if optional else read


def _readers(kind: type[Any]) -> tuple[tuple[str, _Read], ...]:
    hints = get_type_hints(kind, localns={"JSON": JSON})
    return tuple((name, _reader(kind, name, hints[name])) for name in kind._fields)


# How each field of a kind is read, by its type.
_READERS = {kind: _readers(kind) for kind in KINDS.values()}


def _why(kind: type[Any], said: Mapping[str, JSON], error: Exception) -> str:
    """What an event lacks, or which of its fields is of another form."""
    if missing := [name for name in kind._fields if name not in said and name not in kind._field_defaults]:
        return f"it lacks {', '.join(missing)}"
    for name, read in _READERS[kind]:
        try:
            if name in said:
                read(said[name])
        except (TypeError, ValueError, OverflowError, Corrupt, BadInput) as wrong:
            return f"its {name} is of another form ({wrong})"
    return str(error)


def _finite(value: Any) -> JSON:
    """The value with null for NaN and infinity, which JSON lacks and a loss that diverges has."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value  # type: ignore[no-any-return]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which every name stands once: readers differ in which of two they take."""
    said = dict(pairs)
    if len(said) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it says {next(name for name in names if names.count(name) > 1)!r:.40} twice")
    return said


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_CAREFUL = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_once)
