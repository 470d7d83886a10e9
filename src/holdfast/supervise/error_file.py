"""How a worker's last exception reaches its supervisor: JSON of the form that torch's `record` writes.

It goes into a file, so torch's own tools can read ours, and we read that of a script that brings its own `@record`; and
into the memory shared with the supervisor, since the disk may be what has failed.
"""

import json
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from holdfast.errors import HoldfastError, StorageFailed, WorkerLost
from holdfast.progress import WORDS, Progress

Origin = Literal["script", "refused", "storage", "peer"]
"""Whose an error is: the script's, holdfast's own refusal (which would come again), the storage's, or a lost peer's."""


@dataclass(frozen=True, slots=True)
class Raised:
    """What a worker raised: its type and text in one line, its traceback, when, whose it is, and the line that raised.

    `traceback` is empty where the line says it all: an error that holdfast raised on purpose, or a message given to
    `sys.exit`.
    """

    message: str
    traceback: str
    time: float
    origin: Origin = "script"
    place: str = ""


def leave(path: Path, memory: Progress, error: BaseException, script: str) -> None:
    """Record an exception in the memory, and in the file if the disk takes it."""
    said = _said(error, script)
    with suppress(OSError):
        path.write_text(json.dumps(said))
    memory.leave_words(_shortened(said))


def read(path: Path, memory: Progress) -> Raised | None:
    """What was recorded, in the file or else in the memory; nothing if nothing was, or not to its end."""
    with suppress(OSError, ValueError):
        if raised := _parsed(path.read_text()):
            return raised
    return _parsed(memory.last_words)


def _said(error: BaseException, script: str) -> dict[str, Any]:
    message = str(error) if _says_it_all(error) else f"{type(error).__name__}: {error}"
    message += "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    place = _place(error)
    cut = error.with_traceback(_cut(error, script))
    trace = "" if _says_it_all(error) else "".join(traceback.format_exception(cut))
    now = time.time()
    about = {
        "py_callstack": trace,
        "timestamp": str(int(now)),  # torch's stamp is whole seconds
        "time": now,
        "origin": _origin(error),
        "place": place,
    }
    return {"message": {"message": message, "extraInfo": about}}


def _shortened(said: dict[str, Any]) -> str:
    """The record in no more room than there is: of a message the beginning, of a traceback the end."""
    message, about = said["message"], said["message"]["extraInfo"]
    room = WORDS
    while len(text := json.dumps(said)) > WORDS:
        room //= 2
        message["message"], about["py_callstack"] = message["message"][:room], about["py_callstack"][-room:]
    return text


def _parsed(text: str) -> Raised | None:
    try:
        message = json.loads(text)["message"]
        about = message["extraInfo"]
        moment = float(about.get("time", about["timestamp"]))
        origin = about.get("origin", "script")
        whose: Origin = origin if origin in ("refused", "storage", "peer") else "script"
        return Raised(str(message["message"]), str(about["py_callstack"]), moment, whose, str(about.get("place", "")))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _origin(error: BaseException) -> Origin:
    if isinstance(error, StorageFailed):
        return "storage"
    if isinstance(error, WorkerLost):
        return "peer"
    return "refused" if isinstance(error, HoldfastError) else "script"


def _place(error: BaseException) -> str:
    """The line that raised: an error that comes again comes from there."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _says_it_all(error: BaseException) -> bool:
    return isinstance(error, HoldfastError | SystemExit)


def _cut(error: BaseException, script: str) -> TracebackType | None:
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return trace
