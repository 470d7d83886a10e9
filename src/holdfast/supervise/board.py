"""The run's numbers for TensorBoard: event files, written by a process of its own that follows the histories.

TensorBoard's writer has a thread, and a process that forks workers must have none. What the histories say is all there
is to show, so nothing in the training waits for it, and nothing is lost with it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from holdfast.errors import BadInput, HoldfastError
from holdfast.events import JSON, Event, Judged, Recover, Restart, Save, Step
from holdfast.history.follow import Growing
from holdfast.supervise.child_call import Aside

LOOK = 0.5
ENDS_WITHIN = 30.0


class Writer(Protocol):
    """What torch's SummaryWriter is to us."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, walltime: float) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Board:
    """Scalars by step. After a restart a new file begins, which takes the place of the steps that are trained again."""

    def __init__(self, opened: Callable[[int], Writer]) -> None:
        self._opened = opened
        self._writer: Writer | None = None
        self._step = self._restarts = 0
        self.is_over = False

    def add(self, event: Event) -> None:
        """Write what an event says."""
        match event.what:
            case Recover(restored=restored):
                self.close()
                self._step = restored or 0
                self._writer = self._opened(self._step)
                self._write("restarts", self._restarts, event)
            case Step(step=step, loss=loss, seconds=seconds):
                self._step = step
                if loss is not None:
                    self._write("loss", loss, event)
                self._write("seconds/step", seconds.data + seconds.compute + seconds.stall, event)
                self._write("seconds/data", seconds.data, event)
                self._write("seconds/stall", seconds.stall, event)
            case Save(seconds=stall):
                self._write("seconds/save", stall.waited, event)
            case Restart():
                self._restarts += 1
            case Judged():
                self.is_over = True

    def flush(self) -> None:
        """Have on the disk what was written."""
        if self._writer:
            self._writer.flush()

    def close(self) -> None:
        """End the file that is open."""
        if self._writer:
            self._writer.close()
        self._writer = None

    def _write(self, tag: str, value: float, event: Event) -> None:
        if self._writer:
            self._writer.add_scalar(tag, value, self._step, event.time)


def follow(board: Board, files: Sequence[Growing], pause: float = LOOK) -> None:
    """Write what is added to these histories, until the supervisor has judged."""
    while True:
        over = board.is_over  # then everything else was written before
        for event in sorted((event for file in files for event in file.new()), key=lambda event: event.time):
            board.add(event)
        board.flush()
        if over:
            board.close()
            return
        time.sleep(0.0 if board.is_over else pause)


def require() -> None:
    """Refuse where TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        raise BadInput(
            "--tensorboard needs the package tensorboard, which is not installed: pip install 'holdfast[tensorboard]'."
        )


@contextmanager
def boarded(out: Path, who: str) -> Iterator[None]:
    """Event files in the folder of a run, for as long as its supervisor works."""
    require()
    files = [Growing(out / "history" / f"{name}.jsonl") for name in (who, "rank-0")]
    following = Aside(lambda: _follow(out / "tensorboard", files), "TensorBoard's writer")
    patience = 0.0
    try:
        yield
        patience = ENDS_WITHIN
    finally:
        with suppress(HoldfastError):  # a board is to be looked at; no run fails for it
            following.result(patience)


def _follow(folder: Path, files: Sequence[Growing]) -> JSON:
    from torch.utils.tensorboard import SummaryWriter

    follow(Board(lambda step: SummaryWriter(str(folder), purge_step=step)), files)
    return None
