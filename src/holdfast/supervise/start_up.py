"""The start of `holdfast run`, before its workers run: shows its progress, and measures the time of each part.

Most of the time is spent importing torch and its compiler. The garbage collector is paused meanwhile. Otherwise a fifth
of the time would be spent searching the new modules again and again.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console

from holdfast.memory import no_collection

LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"  # torch reads it when it is imported
SLOW = 2.0  # seconds after which a start-up is explained
_parts: dict[str, float] = {}


@contextmanager
def part(name: str, show: Callable[[str], object] = lambda line: None) -> Iterator[None]:
    """Measure the seconds of the `with` block as part `name` of the start-up; `show` is called with a status line."""
    show(f"starting: {name}")
    began = time.perf_counter()
    with no_collection():
        yield
    _parts[name] = time.perf_counter() - began


@contextmanager
def importing_torch() -> Iterator[None]:
    """Measure the import of torch in the block, and show a status line if stderr is a terminal."""
    console = Console(stderr=True)
    status = console.status("holdfast: starting: import torch") if console.is_terminal else nullcontext()
    with status, part("import torch"), without_warnings_of_torch():
        yield


@contextmanager
def without_warnings_of_torch() -> Iterator[None]:
    """Import torch in the block such that its C++ code prints no warnings, in this process and its forks.

    For every closed connection to a store, which is common when a node is lost, torch would print twenty lines. Its
    exceptions say the same. TORCH_CPP_LOG_LEVEL=WARNING in the environment brings the warnings back."""
    if LOG_LEVEL in os.environ:
        yield
        return
    os.environ[LOG_LEVEL] = "ERROR"
    try:
        yield
    finally:
        del os.environ[LOG_LEVEL]  # processes that the script starts have the default


def take_summary() -> str | None:
    """Return a line with the seconds of each measured part; None if the start-up was quick. Forget the parts."""
    named = [f"{name} {seconds:.1f} s" for name, seconds in _parts.items() if seconds >= 0.1]
    total = sum(_parts.values())
    _parts.clear()
    return f"started in {total:.1f} s: {', '.join(named)}" if total >= SLOW else None
