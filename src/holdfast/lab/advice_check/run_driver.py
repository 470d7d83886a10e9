"""A process that does supervised runs one after another: torch is imported once, and nothing else has threads in it.

Reads one line of JSON for each run, its config and its folder, and answers each with how it ended.
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

ENDS_WITHIN = 600.0  # seconds for a run
LEAVES_WITHIN = 30.0


@contextmanager
def start_driver(log: Path) -> Iterator[Callable[[RunConfig, Path], str]]:
    """A process that does runs: called with a config and a folder it returns the verdict. What it prints goes to the log."""
    with (
        log.open("ab") as told,
        Popen([sys.executable, "-m", __spec__.name], stdin=PIPE, stdout=PIPE, stderr=told, text=True) as driver,
    ):
        try:
            yield lambda config, folder: _ask(driver, config, folder)
        finally:
            assert driver.stdin is not None
            driver.stdin.close()
            try:
                driver.wait(LEAVES_WITHIN)
            except TimeoutExpired:
                driver.kill()


def _ask(driver: "Popen[str]", config: RunConfig, folder: Path) -> str:
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
        raise WorkerLost(f"the process that trained {folder.name} ended, or took more than {ENDS_WITHIN:g} s")
    return str(json.loads(answer))


def main() -> None:
    """Do every run that is asked for."""
    from holdfast.supervise.preload import warm
    from holdfast.supervise.supervisor import supervise

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what workers print is no answer
    warm()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            word = supervise(RunConfig.from_json(asked["config"]), Path(asked["folder"])).verdict
        except HoldfastError as error:
            word = f"refused: {error}"  # type: ignore[assignment]
        answers.write(json.dumps(word) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
