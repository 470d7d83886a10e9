"""Whether a served run did all of its iterations, one after the other, and ended as its plan says."""

from holdfast.finding import Verdict, counted
from holdfast.server.audit.server_ledger import ServedLedger


def iterations_follow(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Iterations follow each other without gaps, and none is done after the end."""
    replay = ledger.replay
    if wrong := replay.wrong["ends"]:
        return "fail", wrong[0]
    return ("pass" if replay.iterations else "unknown"), f"{counted(replay.iterations, 'iteration')}, each told once"


def reached_the_end(ledger: ServedLedger) -> tuple[Verdict, str]:
    """The loss came below the criterion, or all allowed iterations were done."""
    replay, plan = ledger.replay, ledger.plan
    if replay.done is None:
        return "unknown", f"the run is not done: {counted(replay.iterations, 'iteration')} on record"
    if replay.done.step != replay.iterations:
        return (
            "fail",
            f"the controller was done after {replay.done.step} iterations, and {replay.iterations} are on record",
        )
    if replay.is_converged:
        return (
            "pass",
            f"the loss {replay.loss:.6g} is below {plan.criterion:.6g} after {counted(replay.iterations, 'iteration')}",
        )
    if replay.iterations == plan.iterations:
        return (
            "pass",
            f"all {counted(plan.iterations, 'iteration')} that were allowed are done; the criterion is not reached",
        )
    return (
        "fail",
        f"the controller was done after {replay.iterations} of {plan.iterations} iterations, above the criterion",
    )
