"""How a worker's last exception reaches its supervisor: a JSON file of the form that torch's `record` writes.

So torch's own tools can read ours, and we read those of a script that brings its own `@record`.
"""

import json
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from holdfast.errors import HoldfastError


@dataclass(frozen=True, slots=True)
class Raised:
    """What a worker raised: its type and text in one line, its traceback, and when.

    `traceback` is empty where the line says it all: an error that holdfast raised on purpose, or a message given to
    `sys.exit`.
    """

    message: str
    traceback: str
    time: float


def write(path: Path, error: BaseException, script: str) -> None:
    """Record an exception, its traceback cut to begin in the script."""
    message = str(error) if _says_it_all(error) else f"{type(error).__name__}: {error}"
    trace = (
        "" if _says_it_all(error) else "".join(traceback.format_exception(error.with_traceback(_cut(error, script))))
    )
    now = time.time()
    about = {"py_callstack": trace, "timestamp": str(int(now)), "time": now}  # torch's stamp is whole seconds
    path.write_text(json.dumps({"message": {"message": message, "extraInfo": about}}))


def read(path: Path) -> Raised | None:
    """What was recorded there; nothing if the file is not there or was not finished."""
    try:
        message = json.loads(path.read_text())["message"]
        about = message["extraInfo"]
        moment = float(about.get("time", about["timestamp"]))
        return Raised(str(message["message"]), str(about["py_callstack"]), moment)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _says_it_all(error: BaseException) -> bool:
    return isinstance(error, HoldfastError | SystemExit)


def _cut(error: BaseException, script: str) -> TracebackType | None:
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return trace
