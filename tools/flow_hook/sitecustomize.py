"""Record every call into a package. Python imports this file at startup if its folder is on PYTHONPATH.

`TRACE_FLOWS_CALLS` names the folder that receives one file per process, and `TRACE_FLOWS_PACKAGE` the package. A line
holds the time of a call and the file of the function, relative to the package. Lines are written at once, so a killed
process loses none and a forked process inherits none.
"""

import fcntl
import os
import sys
import threading
import time
from types import FrameType
from typing import Any

_FUNCTION = 1  # inspect.CO_OPTIMIZED: the body of a function has it, that of a module or a class does not
_HIGH = 700  # a file descriptor far above those that programs use or close
_folder = os.environ.get("TRACE_FLOWS_CALLS", "")
_prefix = os.environ.get("TRACE_FLOWS_PACKAGE", "") + os.sep
_names: dict[str, str] = {}  # code file -> its name within the package, or an empty string
_number = -1


def _record(frame: FrameType, event: str, _: Any) -> None:
    """Record a call if its function belongs to the package."""
    if event != "call":
        return
    code = frame.f_code
    name = _names.get(code.co_filename)
    if name is None:
        path = os.path.realpath(code.co_filename)
        name = _names[code.co_filename] = path[len(_prefix) :] if path.startswith(_prefix) else ""
    if name and code.co_flags & _FUNCTION:
        _write(f"{time.time():.6f} {name}\n".encode())


def _write(line: bytes) -> None:
    """Append a line to the file of this process and open the file first if necessary."""
    global _number
    try:
        os.write(_number, line)
    except OSError:
        opened = os.open(f"{_folder}/{os.getpid()}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        _number = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, _HIGH)
        os.close(opened)
        os.write(_number, line)


def _start_new_file() -> None:
    """Give a forked process a file of its own."""
    global _number
    if _number >= 0:
        os.close(_number)
    _number = -1


if _folder:
    os.register_at_fork(after_in_child=_start_new_file)
    threading.setprofile(_record)
    sys.setprofile(_record)
