"""Whether every round of every iteration reached every block once, but where a loss is declared."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from holdfast.events import Applied
from holdfast.finding import CannotTell, Verdict, counted
from holdfast.sampler.digest import Samples
from holdfast.server.audit.block_owners import Tenure, adds_up, in_force
from holdfast.server.audit.server_ledger import ServedLedger
from holdfast.server.audit.stale_rounds import applied_as_they_came


def every_round_reaches_every_block(ledger: ServedLedger) -> tuple[Verdict, str]:
    """In every round each node applied it to exactly the blocks it held; who did not is lost, and what it lacked declared."""
    replay, rounds = ledger.replay, ledger.plan.rounds
    if not replay.tenures:
        raise CannotTell("blocks were not dealt out yet")
    finished = replay.iterations * rounds
    if ledger.plan.staleness:
        return applied_as_they_came(ledger)
    for number in sorted({*range(finished), *ledger.applied, *replay.dropped}):
        if because := _wrong(ledger, number, finished):
            return "fail", f"iteration {number // rounds} round {number % rounds}: {because}"
    if because := _out_of_order(ledger):
        return "fail", because
    skipped = sum(each.blocks.count for several in replay.dropped.values() for each in several)
    but = f", but {counted(skipped, 'block')} declared dropped" if skipped else ""
    return ("pass" if finished else "unknown"), f"{counted(finished, 'round')} applied to every block once{but}"


def lacking(ledger: ServedLedger, number: int, tenure: Tenure) -> set[int]:
    """Nodes that should have applied a round, and tell of nothing."""
    applied = ledger.applied.get(number, {})
    silent = {node for node in tenure.held if node not in applied}
    if absent := [node for node in silent if not ledger.told("node", node)]:
        raise CannotTell(f"there is no history of node-{min(absent)}")
    return silent


def _wrong(ledger: ServedLedger, number: int, finished: int) -> str | None:
    tenure, applied = in_force(ledger.replay.tenures, number), ledger.applied.get(number, {})
    if ledger.replay.done and number >= finished:
        return "it was applied after the run was done"
    return (
        _other_blocks(tenure, applied)
        or _other_map(ledger.replay.tenures, tenure, applied)
        or _undeclared(ledger, number, tenure, is_finished=number < finished)
    )


def _out_of_order(ledger: ServedLedger) -> str | None:
    """A node that tells of a round after a later one: all wait for each other after every round."""
    for writer in ledger.writers:
        told = [what for what in ledger.told(*writer) if isinstance(what, Applied)] if writer.kind == "node" else []
        for before, after in pairwise(told):
            if ledger.number(after) < ledger.number(before):
                later = f"iteration {before.iteration} round {before.round}"
                return f"node-{writer.number} applied iteration {after.iteration} round {after.round} after {later}"
    return None


def _other_blocks(tenure: Tenure, applied: Mapping[int, Sequence[Applied]]) -> str | None:
    for node, several in applied.items():
        held = tenure.held.get(node, Samples())
        if (found := Samples.total(each.blocks for each in several)) != held:
            which = (
                f"{found.count} of the {held.count}"
                if found.count < held.count
                else f"{found.count} and not the {held.count}"
            )
            which = f"others than the {held.count}" if found.count == held.count else which
            return f"node-{node} applied it to {which} blocks that it holds"
    return None


def _other_map(tenures: Sequence[Tenure], tenure: Tenure, applied: Mapping[int, Sequence[Applied]]) -> str | None:
    later = next((each.version for each in tenures if each.start > tenure.start), None)
    for node, several in applied.items():
        for each in several:
            if each.version < tenure.version or (later is not None and each.version >= later):
                return f"node-{node} applied it by map {each.version}, which was not in force"
    return None


def _undeclared(ledger: ServedLedger, number: int, tenure: Tenure, *, is_finished: bool) -> str | None:
    """What is lacking and what is declared to be must be the same, but for nodes that died when they had done it."""
    silent = lacking(ledger, number, tenure)
    dropped = ledger.replay.dropped.get(number, [])
    lost = {each.number for each in ledger.replay.losses if each.version == number + 1}
    if dropped:
        declared = Samples.total(each.blocks for each in dropped)
        told = _of(tenure, silent & lost), _of(tenure, (lost & set(tenure.held)) - silent)
        if not adds_up(declared, *told):
            return "what is declared dropped is not what nodes held that were lost in it"
        silent -= lost
    if silent and is_finished:
        return f"node-{min(silent)} never applied it, and nothing is declared dropped"
    return None


def _of(tenure: Tenure, nodes: Iterable[int]) -> list[Samples]:
    return [tenure.held[node] for node in nodes if node in tenure.held]
