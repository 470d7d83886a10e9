"""A program that runs supervisors and commands, each in a fork of this process, which has imported torch once for all.

Its arguments are more modules to import. It reads jobs as JSON lines, prints the process id of each, and writes the
result to `<folder of the job>/result.json`. A job with `arguments` is a `holdfast` command.
"""

import ctypes
import gc
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from holdfast import cli
from holdfast.errors import HoldfastError
from holdfast.runs.config import RunConfig
from holdfast.supervise.preload import warm
from holdfast.supervise.start_up import without_warnings_of_torch

with without_warnings_of_torch():  # as `holdfast run` imports it
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
            os._exit(command(job) if "arguments" in job else run(job))
        print(pid, flush=True)  # noqa: T201 - this is a program


def run(job: dict[str, Any]) -> int:
    """Run one supervisor; write its output and result to the folder of the job."""
    redirect_output(job, "stderr")
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
    finish(job, result)
    return code


def command(job: dict[str, Any]) -> int:
    """Run one `holdfast` command after the source text `before`, or only the text `instead`; return its exit status."""
    redirect_output(job, "stdout" if job["together"] else "stderr")
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])
    sys.path[0] = str(Path(sys.executable).parent)  # as the installed command has it
    sys.argv = ["holdfast", *job["arguments"]]
    code: Any = 1
    try:
        exec(job["instead"] or job["before"], {"__name__": "__main__"})
        if not job["instead"]:
            cli.main()
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finish(job, {"exit_status": code or 0})
    return int(code or 0)


def redirect_output(job: dict[str, Any], errors: str) -> None:
    """Write the output of this process to files in the folder of the job, and its errors to the one named `errors`."""
    for number, name in ((1, "stdout"), (2, errors)):
        os.dup2(os.open(Path(job["folder"], name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)


def finish(job: dict[str, Any], result: dict[str, Any]) -> None:
    """Write the result of a job, as one whole file, after all its output."""
    sys.stdout.flush()
    sys.stderr.flush()
    writing = Path(job["folder"], "writing")
    writing.write_text(json.dumps(result))
    writing.rename(writing.with_name("result.json"))


if __name__ == "__main__":
    main()
