"""`holdfast scale`: a request to the supervisor of a run for another number of workers, by a file in the run's folder."""

import json
import time
from contextlib import suppress
from pathlib import Path

from holdfast.atomic_write import write_atomically
from holdfast.errors import BadInput, StorageFailed
from holdfast.events import Judged, Plan, Scale
from holdfast.history.log import recall
from holdfast.runs.config import read_config
from holdfast.runs.lock import is_held

FILE = "scale.json"
WITHIN = 60.0


def scale(out: Path, workers: int) -> Scale:
    """Ask the run in `out` to train with `workers` workers; wait until it does, and return the recorded event.

    Raise BadInput if the run cannot be scaled, or does not answer within a minute."""
    config = read_config(out)
    if config.recovery == "restart":
        raise BadInput(
            f"{out} recovers by restart, and only live recovery can put workers to sleep: stop it, and start it again "
            f"with --workers {workers}."
        )
    if not 1 <= workers <= config.workers:
        raise BadInput(f"--workers must be between 1 and {config.workers}, the workers of {out} (got {workers}).")
    if any(
        isinstance(event.what, Plan) and event.what.sharded
        for event in recall(out / "history" / "rank-0.jsonl", "plan")
    ):
        raise BadInput(
            f"the model of {out} is sharded, and each worker holds a part of it, so none can be put to sleep: stop it, and "
            f"start it again with --workers {workers}."
        )
    history = out / "history" / "supervisor.jsonl"
    if not history.exists() and any(history.parent.glob("supervisor-*.jsonl")):
        raise BadInput(f"{out} runs on several nodes, and only a single node can be scaled: stop and start it again.")
    if not is_held(out):
        raise BadInput(f"no run is active in {out}: start it with `holdfast run`.")
    before = len(_answers(history))
    try:
        write_atomically(out / FILE, json.dumps({"workers": workers}).encode(), out / "scale.partial")
    except OSError as error:
        raise StorageFailed(f"cannot write {out / FILE}: {error.strerror or error}.") from error
    deadline = time.monotonic() + WITHIN
    while time.monotonic() < deadline:
        for answer in _answers(history)[before:]:
            if isinstance(answer, Judged):
                raise BadInput(f"the run in {out} ended before it could be scaled ({answer.verdict}).")
            if answer.workers == workers:
                return answer
        time.sleep(0.05)
    with suppress(OSError):
        (out / FILE).unlink()
    raise BadInput(f"the supervisor of {out} did not answer within {WITHIN:.0f} s: see its output.")


def _answers(history: Path) -> list[Scale | Judged]:
    return [event.what for event in recall(history, "scale", "verdict") if isinstance(event.what, Scale | Judged)]
