"""The audit at the end of `holdfast run`: its verdict in one line, or what failed and what to do next."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.audit.verdicts import Finding
    from holdfast.runs.config import RunConfig

MOST_BYTES = 64 << 20  # of history; the audit reads about 6 MB a second
LONG_BYTES = 8 << 20
AUDIT_FAILED = 3  # the exit status of `holdfast run` for a run that was completed, but whose audit failed


_NEXT = {  # by check that failed
    "every_step_was_trained": "train every batch: a `continue` in the loop leaves out a step; to add up the gradients of "
    "several batches, use run.batches(..., micro_batches=4)",
}


class FinalAudit(NamedTuple):
    """The lines that `holdfast run` prints about the audit of a completed run, and the exit status of the command."""

    lines: tuple[str, ...]
    exit_code: int = 0


def final_audit(folder: Path, config: "RunConfig", nnodes: int, say: Callable[[str], object]) -> FinalAudit:
    """Audit the completed run in `folder`, unless its history is too long or a signal arrives.

    A run of several nodes is not audited, because the other nodes may not have completed their histories yet. `say` is
    called with a line of text before an audit that takes more than about a second."""
    from holdfast.supervise.stop_signals import StopRequested, stop_signals

    command = f"holdfast audit {shlex.quote(str(folder))}"
    if nnodes > 1:
        return FinalAudit((f"audit: not run; when all nodes have ended: {command}",))
    # Not the length of the files: lines that were folded into segments left holes, and are read much faster.
    size = sum(min((at := path.stat()).st_size, at.st_blocks * 512) for path in (folder / "history").glob("*.jsonl"))
    if size > MOST_BYTES:
        return FinalAudit((f"audit: not run, because the history has {size / 1e6:.0f} MB: {command}",))
    if size > LONG_BYTES:
        say(f"auditing {size / 1e6:.0f} MB of history; Ctrl-C skips it")
    try:
        with stop_signals.interrupting():
            return _verdict(folder, config, command)
    except StopRequested:
        return FinalAudit((f"audit: interrupted; the run itself is complete: {command}",))
    except (HoldfastError, OSError) as error:
        return FinalAudit((f"audit: unknown, {error}",))


def _verdict(folder: Path, config: "RunConfig", command: str) -> FinalAudit:
    from holdfast.audit.verdicts import audit_run
    from holdfast.runs.histories import open_history

    with open_history(folder) as history:
        return as_lines(audit_run(history.files, history.facts), config, command)


def as_lines(findings: Sequence["Finding"], config: "RunConfig", command: str) -> FinalAudit:
    """Return the verdict of `findings`, and if it is not a pass, the reasons and what to do next.

    `command` is the command that shows all checks."""
    from holdfast.audit.verdicts import worst

    verdict = worst(findings)
    if verdict == "pass":
        return FinalAudit(("audit: pass",))
    found = {finding.check: finding.because for finding in findings if finding.verdict == verdict}
    steps = [*next_steps(findings, config), f"{command} shows every check"]
    reasons = [f"  {check.replace('_', ' ')}: {because}" for check, because in found.items()]
    lines = [f"audit: {verdict}", *reasons, *(f"  next: {step}" for step in steps)]
    return FinalAudit(tuple(lines), AUDIT_FAILED if verdict == "fail" else 0)


def next_steps(findings: Sequence["Finding"], config: "RunConfig | None") -> list[str]:
    """Return what to do about the checks that failed. `config` has the settings of the run, if they are known."""
    failed = [finding.check for finding in findings if finding.verdict == "fail"]
    rehearsal = [f"{_rehearsal(config)} names the first tensor that differs, and the likely cause"] if config else []
    return [
        *(rehearsal if "repeated_steps_agree" in failed else []),
        *(_NEXT[check] for check in failed if check in _NEXT),
    ]


def _rehearsal(config: "RunConfig") -> str:
    workers = ["--workers", str(config.workers)] if config.workers > 1 else []
    recovery = ["--recovery", "replay"] if config.recovery == "replay" else []
    module = ["-m"] if config.module else []
    arguments = ["--", *config.args] if config.args else []
    return shlex.join(["holdfast", "rehearse", *workers, *recovery, *module, config.script, *arguments])
