"""How many workers are to train, as somebody asks the supervisor of a run that goes on: by a file in its folder."""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast.errors import BadInput, StorageFailed
from holdfast.events import Judged, Scale
from holdfast.history.log import recall
from holdfast.runs.config import RunConfig, read_config
from holdfast.runs.lock import is_held

WISH = "scale.json"
LOOK = 0.05
WITHIN = 60.0


class Wishes:
    """What is wished for from now on; what was wished for before is not."""

    def __init__(self, out: Path) -> None:
        self._path = out / WISH
        self._path.unlink(missing_ok=True)
        self._known = 0

    def new(self) -> int | None:
        """The number of workers that are to train, if somebody has asked for one since the last look."""
        try:
            changed = self._path.stat().st_mtime_ns
            if changed == self._known:
                return None
            self._known = changed
            wanted = json.loads(self._path.read_bytes()[:1000])["workers"]
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return wanted if isinstance(wanted, int) else None


def scale(out: Path, workers: int, tick: Callable[[], None] = lambda: None) -> Scale:
    """Ask for so many workers and wait until so many train; `tick` is called while we wait."""
    config = read_config(out)
    _check(out, config, workers)
    history = out / "history" / "supervisor.jsonl"
    before = len(_answers(history))
    _write(out / WISH, json.dumps({"workers": workers}))
    deadline = time.monotonic() + WITHIN
    while time.monotonic() < deadline:
        for answer in _answers(history)[before:]:
            if isinstance(answer, Judged):
                raise BadInput(f"the run in {out} has ended before it could be scaled ({answer.verdict}).")
            if answer.workers == workers:
                return answer
        tick()
        time.sleep(LOOK)
    with suppress(OSError):
        (out / WISH).unlink()
    raise BadInput(f"the supervisor of {out} did not answer within {WITHIN:.0f} s: see what it says where it runs.")


def _check(out: Path, config: RunConfig, workers: int) -> None:
    if config.recovery == "restart":
        raise BadInput(
            f"{out} recovers by restart, and only live recovery puts workers to sleep: stop it, and start it again with "
            f"--workers {workers}."
        )
    if not 1 <= workers <= config.workers:
        raise BadInput(f"{out} has {config.workers} workers: give --workers 1 to {config.workers}.")
    if not (out / "history" / "supervisor.jsonl").exists() and any((out / "history").glob("supervisor-*.jsonl")):
        raise BadInput(
            f"{out} runs on several nodes, and only one node alone can be scaled: stop it and start it anew."
        )
    if not is_held(out):
        raise BadInput(f"nothing runs in {out}: start it with `holdfast run`.")


def _answers(history: Path) -> list[Scale | Judged]:
    return [event.what for event in recall(history, "scale", "verdict") if isinstance(event.what, Scale | Judged)]


def _write(path: Path, text: str) -> None:
    """At once, for whoever reads it."""
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    except OSError as error:
        raise StorageFailed(f"cannot write {path}: {error.strerror or error}.") from error
