"""A process that executes supervised runs one after another; it imports torch once and has no other threads.

For each run it reads a line of JSON with the config and the folder, and answers with the verdict of the run.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from threading import Timer

from holdfast.errors import HoldfastError, WorkerLost
from holdfast.runs.config import RunConfig

ENDS_WITHIN = 600.0  # the most seconds that a run may take
LEAVES_WITHIN = 30.0


@contextmanager
def start_driver(log: Path) -> Iterator[Callable[[RunConfig, Path], str]]:
    """Start the driver process and yield a function that executes a run in a folder and returns its verdict."""
    with (
        log.open("ab") as output,
        Popen([sys.executable, "-m", __spec__.name], stdin=PIPE, stdout=PIPE, stderr=output, text=True) as driver,
    ):
        try:
            yield lambda config, folder: _execute(driver, config, folder)
        finally:
            assert driver.stdin is not None
            driver.stdin.close()
            try:
                driver.wait(LEAVES_WITHIN)
            except TimeoutExpired:
                driver.kill()


def _execute(driver: "Popen[str]", config: RunConfig, folder: Path) -> str:
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
    return str(json.loads(answer))


def main() -> None:
    """Execute the runs that are requested on standard input, until it is closed."""
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
