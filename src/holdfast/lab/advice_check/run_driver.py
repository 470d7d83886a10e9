"""A process that executes supervised runs one after another; it imports torch once and has no other threads.

For each run it reads a line of JSON with the config and the folder, and answers with the verdict of the run.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from tempfile import TemporaryDirectory
from threading import Timer

from holdfast.errors import HoldfastError, WorkerLost
from holdfast.events import Event
from holdfast.history.log import read_history
from holdfast.runs.config import RunConfig

ENDS_WITHIN = 600.0  # the most seconds that a run may take
LEAVES_WITHIN = 30.0


@contextmanager
def start_driver(out: Path) -> Iterator[Callable[[RunConfig, str], Sequence[Event]]]:
    """Start a process that executes runs, and yield a function that executes one run and returns its events.

    The function takes the config and a name, and raises WorkerLost if the run fails. Runs are stored below `out`."""
    with (
        TemporaryDirectory(dir=out, ignore_cleanup_errors=True) as folder,
        (out / "runs.log").open("ab") as output,
        Popen([sys.executable, "-m", __spec__.name], stdin=PIPE, stdout=PIPE, stderr=output, text=True) as driver,
    ):
        assert driver.stdin is not None
        try:
            yield lambda config, name: _execute(driver, config, Path(folder).absolute() / name)
        finally:
            driver.stdin.close()
            try:
                driver.wait(LEAVES_WITHIN)
            except TimeoutExpired:
                driver.kill()


def _execute(driver: "Popen[str]", config: RunConfig, folder: Path) -> Sequence[Event]:
    assert driver.stdin is not None
    assert driver.stdout is not None
    timer = Timer(ENDS_WITHIN, driver.kill)
    timer.start()
    try:
        driver.stdin.write(json.dumps({"config": config.to_json(), "folder": str(folder)}) + "\n")
        driver.stdin.flush()
        answer = driver.stdout.readline()
    finally:
        timer.cancel()
    if not answer:
        raise WorkerLost(f"the process that trained {folder.name} ended, or took more than {ENDS_WITHIN:g} s.")
    if (verdict := json.loads(answer)) != "completed":
        raise WorkerLost(f"the run {folder.name} was not completed: {verdict}.")
    return read_history(folder).events


def main() -> None:
    """Execute the runs that are requested on standard input, until standard input is closed."""
    from holdfast.supervise.preload import warm
    from holdfast.supervise.supervisor import supervise

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps what workers print out of the answers
    warm()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            verdict: str = supervise(RunConfig.from_json(request["config"]), Path(request["folder"])).verdict
        except HoldfastError as error:
            verdict = f"refused: {error}"
        answers.write(json.dumps(verdict) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
