"""The start of `holdfast run`, before its workers run: what it does is shown, and each part is timed.

Most of it is importing torch and its compiler. The garbage collector is paused meanwhile: it would search the new
modules again and again, a fifth of the time, and finds nothing to free.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

SLOW = 2.0  # seconds after which a start-up is explained
_parts: dict[str, float] = {}


@contextmanager
def part(name: str, show: Callable[[str], object]) -> Iterator[None]:
    """Measure the time of the `with` block as the part `name` of the start-up; `show` displays a status line."""
    show(f"starting: {name}")
    began, is_enabled = time.perf_counter(), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _parts[name] = _parts.get(name, 0.0) + time.perf_counter() - began
        if is_enabled:
            gc.enable()


@contextmanager
def importing_torch() -> Iterator[None]:
    """Measure the import of torch in the `with` block, and show a status line if stderr is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with part("import torch", lambda _: None):
            yield
        return
    with (
        console.status("holdfast: starting") as status,
        part("import torch", lambda line: status.update(f"holdfast: {line}")),
    ):
        yield


def take_summary() -> str | None:
    """Return a line with the seconds of each measured part and clear them; None if the start-up was quick."""
    parts = dict(_parts)
    _parts.clear()
    total = sum(parts.values())
    if total < SLOW:
        return None
    named = [f"{name} {seconds:.1f} s" for name, seconds in parts.items() if seconds >= 0.1]
    return f"started in {total:.1f} s: {', '.join(named)}"
