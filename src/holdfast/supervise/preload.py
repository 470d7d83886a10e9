"""What the supervisor imports before it forks workers, so that no worker, and no restart, waits for it.

Nothing here may start a thread pool or a CUDA context, which a fork would break.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from holdfast.errors import BadInput

# Most of the time of a cold start is torch itself and, when a model is first wrapped in DDP, the compiler behind it.
MODULES = (
    "torch",
    "torch.distributed",
    "torch.distributed.optim",
    "torch.nn.parallel.distributed",
    "torch.optim.lr_scheduler",
    "torch.utils.data",
    "torch._dynamo",
    "holdfast.train.attach",
    "holdfast.train.run",
)


def warm(preload: Sequence[str] = (), beside: Path | None = None) -> None:
    """Import what training needs, and the modules named by the user, which may lie beside a script in this folder."""
    # Then a module that only asks at import whether there is a GPU does not start CUDA to find out.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for name in MODULES:
        import_module(name)
    import_module("holdfast.train.attach").settle()  # for every worker at once
    with _found_in(beside):
        for name in preload:
            try:
                import_module(name)
            except ImportError as error:
                raise BadInput(f"cannot import {name}, named by --preload: {error}.") from error
    if cuda_started():
        raise BadInput(
            f"a module named by --preload ({', '.join(preload)}) starts CUDA, which no fork survives: drop it."
        )


@contextmanager
def _found_in(folder: Path | None) -> Iterator[None]:
    """Imports find what lies in this folder, as they do in a script that lies there."""
    before = list(sys.path)
    if folder:
        sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before


def cuda_started() -> bool:
    """Whether the driver is in use in this process; torch itself knows only of a context of its own."""
    folder = Path("/proc/self/fd")
    files = folder.iterdir() if folder.exists() else ()
    return any(os.path.realpath(file).startswith("/dev/nvidia-uvm") for file in files)
