"""The record of the exception that ended a worker: the worker writes it, and the supervisor reads it.

It is JSON in the format of torch's `record`: in a file, and in memory shared with the supervisor, because the disk may
have failed.
"""

import json
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast.errors import HoldfastError, InitialWeightsLost, StateCorrupted, StorageFailed, WorkerLost
from holdfast.progress import WORDS, Progress

Origin = Literal["script", "refused", "storage", "peer", "overwritten", "corruption"]
"""The source of an error: the script, a refusal by holdfast (which a restart would repeat), storage, a lost peer,
damaged snapshots that have overwritten the initial weights of a sharded model, or a wrong state."""


@dataclass(frozen=True, slots=True)
class RaisedException:
    """An exception that a worker raised, its kind of error (`origin`), and its file and line (`place`)."""

    message: str  # type and text, as one line
    traceback: str  # empty for errors of holdfast itself and for `sys.exit` with a text
    time: float
    origin: Origin = "script"
    place: str = ""
    culprit: int | None = None  # the rank whose state is wrong, if that is known


def write_error(path: Path, memory: Progress, error: BaseException, script: str) -> None:
    """Record an exception of `script` in shared `memory`, and also in the file `path` if the disk accepts it."""
    record = _error_record(error, script)
    with suppress(OSError):
        path.write_text(json.dumps(record))
    memory.leave_words(_shortened(record))


def read_error(path: Path, memory: Progress) -> RaisedException | None:
    """Return the exception recorded in the file `path`, or else in shared `memory`; None if there is none."""
    with suppress(OSError, ValueError):
        if raised := _parse_error(path.read_text()):
            return raised
    return _parse_error(memory.last_words)


def _error_record(error: BaseException, script: str) -> dict[str, Any]:
    is_self_explanatory = isinstance(error, HoldfastError | SystemExit)
    message = str(error) if is_self_explanatory else f"{type(error).__name__}: {error}"
    message += "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    frames = traceback.extract_tb(error.__traceback__)
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename != script:  # the frames that run the script
        trace = trace.tb_next
    cut, now = error.with_traceback(trace), time.time()
    extra = {
        "py_callstack": "" if is_self_explanatory else "".join(traceback.format_exception(cut)),
        "timestamp": str(int(now)),  # torch writes whole seconds
        "time": now,
        "origin": _origin(error),
        "culprit": error.rank if isinstance(error, StateCorrupted) else None,
        "place": f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "",
    }
    return {"message": {"message": message, "extraInfo": extra}}


def _shortened(record: dict[str, Any]) -> str:
    message, extra = record["message"], record["message"]["extraInfo"]
    room = WORDS
    while len(text := json.dumps(record)) > WORDS:
        room //= 2
        message["message"], extra["py_callstack"] = message["message"][:room], extra["py_callstack"][-room:]
    return text


def _parse_error(text: str) -> RaisedException | None:
    try:
        message = json.loads(text)["message"]
        extra = message["extraInfo"]
        moment = float(extra.get("time", extra["timestamp"]))
        name = extra.get("origin", "script")
        origin: Origin = name if name in ("refused", "storage", "peer", "overwritten", "corruption") else "script"
        culprit = extra.get("culprit") if origin == "corruption" else None
        place = str(extra.get("place", ""))
        return RaisedException(str(message["message"]), str(extra["py_callstack"]), moment, origin, place, culprit)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _origin(error: BaseException) -> Origin:
    if isinstance(error, InitialWeightsLost):
        return "overwritten"
    if isinstance(error, StorageFailed):
        return "storage"
    if isinstance(error, StateCorrupted):
        return "corruption"
    if isinstance(error, WorkerLost):
        return "peer"
    return "refused" if isinstance(error, HoldfastError) else "script"
