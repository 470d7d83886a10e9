"""How a worker ends where nothing that it raises is heard: as its script lets go of the loop, Python ignores errors."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

_last: list[Callable[[BaseException], None]] = []


def tell(last_words: Callable[[BaseException], None]) -> None:
    """Have this called with the error that ends the process, before it ends."""
    _last.append(last_words)


def die(error: BaseException) -> NoReturn:
    """End this process at once, for this reason: closing our connections is how peers learn of it."""
    for each in _last:
        each(error)
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201 - nobody else can say it
    sys.stdout.flush()
    os._exit(1)
