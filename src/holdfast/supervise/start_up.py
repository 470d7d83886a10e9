"""The start of `holdfast run`, before its workers run: most of it is importing torch, and what it does is shown.

The garbage collector is paused meanwhile: it would search the new modules again and again, a fifth of the time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console

from holdfast.memory import no_collection


@contextmanager
def part(name: str, show: Callable[[str], object]) -> Iterator[None]:
    """Pass a status line with the `name` of this part to `show`, and pause the garbage collector in the block."""
    show(f"starting: {name}")
    with no_collection():
        yield


@contextmanager
def importing_torch() -> Iterator[None]:
    """Pause the garbage collector in the block, and show a status line if stderr is a terminal."""
    console = Console(stderr=True)
    status = console.status("holdfast: starting: import torch") if console.is_terminal else nullcontext()
    with status, no_collection():
        yield
