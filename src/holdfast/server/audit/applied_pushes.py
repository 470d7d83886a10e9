"""TODO."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from holdfast.events import Applied, Pushed
from holdfast.finding import CannotTell, Verdict, counted
from holdfast.sampler.digest import Samples
from holdfast.server.audit.block_owners import Tenure, adds_up, in_force
from holdfast.server.audit.server_ledger import ServedLedger, ServerWriter
from holdfast.server.audit.stale_rounds import applied_as_they_came, pushed_as_they_came


def every_round_reaches_every_block(ledger: ServedLedger) -> tuple[Verdict, str]:
    """In every round each node applied it to exactly the blocks it held; who did not is lost, and what it lacked declared."""
    replay, rounds = ledger.replay, ledger.plan.rounds
    if not replay.tenures:
        raise CannotTell("blocks were not dealt out yet")
    finished = replay.iterations * rounds
    if ledger.plan.staleness:
        return applied_as_they_came(ledger)
    for number in sorted({*range(finished), *ledger.applied, *replay.dropped}):
        if because := _wrong_round(ledger, number, finished):
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


def _wrong_round(ledger: ServedLedger, number: int, finished: int) -> str | None:
    tenure, applied = in_force(ledger.replay.tenures, number), ledger.applied.get(number, {})
    if ledger.replay.done and number >= finished:
        return "it was applied after the run was done"
    return (
        _other_blocks(tenure, applied)
        or _other_map(ledger.replay.tenures, tenure, applied)
        or _undeclared_round(ledger, number, tenure, is_finished=number < finished)
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


def _undeclared_round(ledger: ServedLedger, number: int, tenure: Tenure, *, is_finished: bool) -> str | None:
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


def every_push_is_applied_once(ledger: ServedLedger) -> tuple[Verdict, str]:
    """In every round each node applied what was pushed to it from every part of the input, once and nothing else."""
    replay, rounds = ledger.replay, ledger.plan.rounds
    if not replay.tenures:
        raise CannotTell("blocks were not dealt out yet")
    if ledger.plan.staleness:
        return pushed_as_they_came(ledger)
    count = dropped = 0
    for number in range(replay.iterations * rounds):
        tenure = in_force(replay.tenures, number)
        pushed = _final(ledger, number)
        if because := _wrong_push(ledger, number, tenure, pushed):
            return "fail", f"iteration {number // rounds} round {number % rounds}: {because}"
        silent = lacking(ledger, number, tenure)
        count += len(pushed)
        dropped += sum(bool(silent & set(each.nodes)) for each in pushed.values())
    last = max((number for number, _ in ledger.pushed), default=-1)
    if replay.done and last >= replay.iterations * rounds:
        return "fail", f"iteration {last // rounds} round {last % rounds}: it was pushed after the run was done"
    but = f", of which {dropped} declared dropped for the blocks of lost nodes" if dropped else ""
    return ("pass" if count else "unknown"), f"{count} {'push' if count == 1 else 'pushes'}{but}"


def parts_change_hands_only_by_loss(ledger: ServedLedger) -> tuple[Verdict, str]:
    """A worker computes from its own part of the input, and from another's once that one is lost."""
    taken: set[int] = set()
    for (number, part), several in ledger.pushed.items():
        if part >= ledger.plan.workers:
            return "fail", f"worker-{several[0][0]} pushed from part {part}, and there are {ledger.plan.workers}"
        for worker, _ in several:
            gone = ledger.replay.members.workers_lost.get(part)
            if worker != part and (gone is None or number < gone):
                return "fail", f"worker-{worker} pushed from part {part}, and nobody told that worker-{part} was lost"
            taken |= {part} if worker != part else set()
    return (
        "pass",
        f"{counted(len(taken), 'part')} of the input taken over" if taken else "every worker had its own part",
    )


def _final(ledger: ServedLedger, number: int) -> Mapping[int, Pushed]:
    """By part, what was pushed for a round by the last map under which it was applied."""
    applied = ledger.applied.get(number, {})
    version = max((each.version for several in applied.values() for each in several), default=math.inf)
    final: dict[int, Pushed] = {}
    for part in range(ledger.plan.workers):
        for _, push in ledger.pushed.get((number, part), ()):
            if push.version <= version and (part not in final or push.version > final[part].version):
                final[part] = push
    return final


def _wrong_push(ledger: ServedLedger, number: int, tenure: Tenure, pushed: Mapping[int, Pushed]) -> str | None:
    for part in range(ledger.plan.workers):
        if part not in pushed:
            if ServerWriter("worker", part) not in ledger.writers:
                raise CannotTell(f"there is no history of worker-{part}")
            return f"it was applied, and nothing was pushed from part {part}"
        if because := _unlike(ledger, number, pushed[part]):
            return because
        if strange := set(pushed[part].nodes) - set(tenure.held):
            return f"part {part} was pushed to node-{min(strange)}, which held nothing"
        if because := _misdirected(tenure, pushed[part]):
            return because
    return _misapplied(ledger, number, pushed) or _undeclared_push(ledger, number, tenure, pushed)


def _unlike(ledger: ServedLedger, number: int, final: Pushed) -> str | None:
    """Two workers that pushed from one part by one map must have pushed the same blocks to the same nodes."""
    for worker, push in ledger.pushed[number, final.part]:
        if push.version == final.version and (push.blocks, set(push.nodes)) != (final.blocks, set(final.nodes)):
            return f"worker-{worker} pushed other blocks from part {final.part} than another did"
    return None


def _misdirected(tenure: Tenure, push: Pushed) -> str | None:
    """A push goes to those who hold its blocks, at least one each: which of theirs, only the push itself tells."""
    held, count = tenure.together(tuple({*push.nodes})), push.blocks.count
    if len({*push.nodes}) < len(push.nodes) or not len(push.nodes) <= count <= held.count:
        return f"part {push.part} was pushed for {count} blocks to {len(push.nodes)} nodes that hold {held.count}"
    if count == held.count and push.blocks != held:
        return f"part {push.part} was pushed for {count} other blocks than its nodes hold"
    return None


def _misapplied(ledger: ServedLedger, number: int, pushed: Mapping[int, Pushed]) -> str | None:
    for node, several in ledger.applied.get(number, {}).items():
        applied = sorted(part for each in several for part in each.parts)
        due = sorted(part for part, push in pushed.items() if node in push.nodes)
        if applied != due:
            return (
                f"node-{node} applied what was pushed from parts {_named(applied)}, and {_named(due)} were pushed to it"
            )
    return None


def _undeclared_push(ledger: ServedLedger, number: int, tenure: Tenure, pushed: Mapping[int, Pushed]) -> str | None:
    declared = {part for each in ledger.replay.dropped.get(number, ()) for part in each.parts}
    silent = lacking(ledger, number, tenure)
    for part, push in pushed.items():
        if silent & set(push.nodes) and part not in declared:
            return f"what was pushed from part {part} to node-{min(silent)} was not applied, nor declared dropped"
    return None


def _named(parts: list[int]) -> str:
    return ", ".join(map(str, parts)) or "none"
