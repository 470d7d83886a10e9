"""Writes down every call into a package: Python imports this at its start where its folder is on PYTHONPATH.

`TRACE_FLOWS_CALLS` names the folder that gets one file for each process, and `TRACE_FLOWS_PACKAGE` the package. A line
is the time of a call and the file of the function, relative to the package. It is written at once, with nothing kept in
memory, so a process that is killed loses nothing and a forked one inherits nothing.
"""

import fcntl
import os
import sys
import threading
import time
from types import FrameType
from typing import Any

_FUNCTION = 1  # inspect.CO_OPTIMIZED: the body of a function has it, that of a module or a class does not
_HIGH = 700  # a file number that nobody else uses, even if somebody closes all files
_folder = os.environ.get("TRACE_FLOWS_CALLS", "")
_prefix = os.environ.get("TRACE_FLOWS_PACKAGE", "") + os.sep
_names: dict[str, str] = {}  # of each file of code its name in the package, or nothing
_number = -1


def _record(frame: FrameType, event: str, _: Any) -> None:
    """Write down a call, if its function is in the package."""
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
    """Append a line to the file of this process, which is opened (again) if it is not open."""
    global _number
    try:
        os.write(_number, line)
    except OSError:
        opened = os.open(f"{_folder}/{os.getpid()}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        _number = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, _HIGH)
        os.close(opened)
        os.write(_number, line)


def _begin_anew() -> None:
    """Give a forked process a file of its own."""
    global _number
    if _number >= 0:
        os.close(_number)
    _number = -1


if _folder:
    os.register_at_fork(after_in_child=_begin_anew)
    threading.setprofile(_record)
    sys.setprofile(_record)
