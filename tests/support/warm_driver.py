"""A program that runs supervisors, each in a fork of this process, which has imported torch once for all of them.

Its arguments are more modules to import. It reads jobs as JSON lines, prints the process id of each, and writes the
result to `<folder of the job>/result.json`.
"""

import ctypes
import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.runs.config import RunConfig
from holdfast.supervise.preload import warm
from holdfast.supervise.supervisor import supervise
from holdfast.supervise.workers import entry

CLONE_NEWNET = 0x40000000


def main() -> None:
    """Fork a supervisor for each line of standard input."""
    warm(sys.argv[1:])
    entry.thread_pools()
    gc.collect()
    gc.freeze()  # otherwise the garbage collector of every fork would copy all pages of torch
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the results are files, so no exit status is needed
    for line in sys.stdin:
        job = json.loads(line)
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os._exit(run(job))
        print(pid, flush=True)  # noqa: T201 - this is a program


def run(job: dict[str, Any]) -> int:
    """Run one supervisor; write its output and result to the folder of the job."""
    folder = Path(job["folder"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if namespace := job["namespace"]:
        with Path("/run/netns", namespace).open() as file:
            assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0
    os.environ.update(job["environment"])
    try:
        verdict = supervise(RunConfig.from_json(job["config"]), Path(job["out"]), **job["nodes"])
        result = {"verdict": verdict.verdict, "because": verdict.because, "attempts": verdict.attempts}
        code = verdict.exit_code
    except HoldfastError as error:
        result, code = {"refused": str(error)}, 2
    sys.stdout.flush()
    (folder / "writing").write_text(json.dumps(result))
    (folder / "writing").rename(folder / "result.json")
    return code


if __name__ == "__main__":
    main()
