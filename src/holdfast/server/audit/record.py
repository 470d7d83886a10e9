"""Whether the record of a served run is whole: every line is one that its writer can know, by everybody who took part."""

from holdfast.finding import SHOWN, Verdict, counted
from holdfast.server.audit.server_ledger import ServedLedger, Writer


def history_is_readable(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Every event says what its kind must say, in the file of a writer who can know it."""
    if wrong := ledger.wrong:
        more = ["and more"] if len(wrong) > SHOWN else []
        return "fail", f"{counted(len(wrong), 'line')} cannot be right: {'; '.join([*wrong[:SHOWN], *more])}"
    torn = [f"{each.path.name} line {each.line}, {each.size} bytes" for each in ledger.torn]
    left = f"; killed writers left {counted(len(torn), 'torn line')}: {'; '.join(torn)}" if torn else ""
    return "pass", f"{counted(ledger.events, 'event')} of {counted(len(ledger.writers), 'writer')}{left}"


def all_members_are_on_record(ledger: ServedLedger) -> tuple[Verdict, str]:
    """There is a history of the controller, and of every node and worker that the run began with or that did anything."""
    plan, there = ledger.plan, set(ledger.writers)
    needed = {Writer("node", n) for n in range(plan.nodes)} | {Writer("worker", n) for n in range(plan.workers)}
    needed |= {Writer("node", node) for tenure in ledger.replay.tenures for node in tenure.held}
    if absent := sorted(needed - there):
        names = ", ".join(f"{each.kind}-{each.number}" for each in absent[:SHOWN])
        return "unknown", f"there is no history of {names}: bring those of all machines together"
    ever = ledger.replay.ever
    strangers = [each for each in ledger.writers if each.kind != "controller" and each.number not in ever[each.kind]]
    for each in strangers:
        if len(ledger.told(each.kind, each.number)) > 1:  # more than that it opened its file
            return "fail", f"{each.kind}-{each.number} has a history, and never joined"
    return (
        "pass",
        f"the histories of the controller, {counted(len(ever['node']), 'node')} and {counted(len(ever['worker']), 'worker')}",
    )


def one_plan(ledger: ServedLedger) -> tuple[Verdict, str]:
    """All lives of the controller train the same workload in the same way."""
    first, *others = ledger.plans or [ledger.plan]
    for other in others:
        fields = [name for name in first._fields if name != "attempt"]
        if differing := [name for name in fields if getattr(first, name) != getattr(other, name)]:
            return "fail", f"life {other.attempt} of the controller has another plan: {', '.join(differing)} differ"
    return "pass", (
        f"{first.workload}, {counted(first.blocks, 'block')} on {counted(first.nodes, 'node')}, by "
        f"{counted(1 + len(others), 'life') if not others else f'{1 + len(others)} lives'} of the controller"
    )
