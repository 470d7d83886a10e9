"""Real training runs inside an experiment, supervised by the process of the experiment."""

from pathlib import Path

from rich.console import Console

from holdfast.runs.config import RunConfig
from holdfast.supervise.stop_signals import stop_signals
from holdfast.supervise.supervisor import supervise
from holdfast.supervise.verdict import RunVerdict


def execute(config: RunConfig, folder: Path, log: Path) -> RunVerdict:
    """Train as `config` says, in the run folder `folder`, and return how the run ended.

    The supervisor's output is appended to the file `log`. Raise KeyboardInterrupt if a signal asked this process to
    stop."""
    with log.open("a") as output:
        verdict = supervise(config, folder, console=Console(file=output, width=160))
    # The signal asked to stop the experiment, not one run. A run that was about to end anyway is completed in spite of it.
    if verdict.verdict == "preempted" or stop_signals.count:
        raise KeyboardInterrupt
    return verdict
