"""Check that every round was applied once to every block, and every push was applied once or recorded as dropped."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from holdfast.events import Applied, Pushed
from holdfast.finding import CannotTell, Verdict, counted
from holdfast.sampler.digest import Samples
from holdfast.server.audit.block_owners import Tenure, adds_up, in_force
from holdfast.server.audit.server_ledger import ServedLedger, ServerWriter
from holdfast.server.audit.stale_rounds import applied_as_they_came, pushed_as_they_came


def every_round_reaches_every_block(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Check that nodes applied each round of updates to all their blocks, except updates recorded as dropped.

    The last iteration of an interrupted run is not checked."""
    replay, rounds = ledger.replay, ledger.plan.rounds
    if not replay.tenures:
        raise CannotTell("no blocks have been dealt out yet")
    finished = replay.iterations * rounds
    if ledger.plan.staleness:
        return applied_as_they_came(ledger)
    for number in range(finished):
        tenure, applied = in_force(replay.tenures, number), ledger.applied.get(number, {})
        because = _other_blocks(tenure, applied) or _other_map(replay.tenures, tenure, applied)
        if because := because or _undeclared_round(ledger, number, tenure):
            return "fail", f"iteration {number // rounds} round {number % rounds}: {because}"
    last = max([*ledger.applied, *replay.dropped], default=-1)
    if replay.done and last >= finished:
        return "fail", f"iteration {last // rounds} round {last % rounds}: it was applied after the run had ended"
    if because := _out_of_order(ledger):
        return "fail", because
    skipped = sum(event.blocks.count for events in replay.dropped.values() for event in events)
    but = f", except {counted(skipped, 'block')} declared dropped" if skipped else ""
    return ("pass" if finished else "unknown"), f"{counted(finished, 'round')} applied to every block once{but}"


def lacking(ledger: ServedLedger, number: int, tenure: Tenure) -> set[int]:
    """Return the nodes that own blocks in the period `tenure` but recorded no updates for the round `number`."""
    applied = ledger.applied.get(number, {})
    silent = {node for node in tenure.held if node not in applied}
    if absent := [node for node in silent if not ledger.events_of("node", node)]:
        raise CannotTell(f"there is no history of node-{min(absent)}")
    return silent


def _out_of_order(ledger: ServedLedger) -> str | None:
    for writer in ledger.writers:
        rounds = [what for what in ledger.events_of(*writer) if isinstance(what, Applied) and writer.kind == "node"]
        for before, after in pairwise(rounds):
            if ledger.number(after) < ledger.number(before):
                later = f"iteration {before.iteration} round {before.round}"
                return f"node-{writer.number} applied iteration {after.iteration} round {after.round} after {later}"
    return None


def _other_blocks(tenure: Tenure, applied: Mapping[int, Sequence[Applied]]) -> str | None:
    for node, events in applied.items():
        held = tenure.held.get(node, Samples())
        if (changed := Samples.total(event.blocks for event in events)) != held:
            which = f"{changed.count} {'of' if changed.count < held.count else 'instead of'} the {held.count}"
            which = f"other than the {held.count}" if changed.count == held.count else which
            return f"node-{node} applied it to {which} blocks that it held"
    return None


def _other_map(tenures: Sequence[Tenure], tenure: Tenure, applied: Mapping[int, Sequence[Applied]]) -> str | None:
    later = next((event.version for event in tenures if event.start > tenure.start), None)
    for node, events in applied.items():
        for event in events:
            if event.version < tenure.version or (later is not None and event.version >= later):
                return f"node-{node} applied it by map {event.version}, which was not in force"
    return None


def _undeclared_round(ledger: ServedLedger, number: int, tenure: Tenure) -> str | None:
    silent = lacking(ledger, number, tenure)
    dropped = ledger.replay.dropped.get(number, [])
    lost = {event.number for event in ledger.replay.losses if event.version == number + 1}
    if dropped:
        declared = Samples.total(event.blocks for event in dropped)
        missing = [tenure.held[node] for node in silent & lost]
        applied = [tenure.held[node] for node in (lost & set(tenure.held)) - silent]
        if not adds_up(declared, missing, applied):
            return "the blocks declared dropped are not those of the nodes lost in it"
        silent -= lost
    if silent:
        return f"node-{min(silent)} never applied it, but nothing is declared dropped"
    return None


def every_push_is_applied_once(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Check that nodes applied each update pushed by a worker exactly once, except updates recorded as dropped."""
    replay, rounds = ledger.replay, ledger.plan.rounds
    if not replay.tenures:
        raise CannotTell("no blocks have been dealt out yet")
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
        dropped += sum(bool(silent & set(push.nodes)) for push in pushed.values())
    last = max((number for number, _ in ledger.pushed), default=-1)
    if replay.done and last >= replay.iterations * rounds:
        return "fail", f"iteration {last // rounds} round {last % rounds}: it was pushed after the run had ended"
    but = f", of which {dropped} declared dropped for the blocks of lost nodes" if dropped else ""
    return ("pass" if count else "unknown"), f"{count} {'push' if count == 1 else 'pushes'}{but}"


def parts_change_hands_only_by_loss(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Check that worker i processed part i of the training data, or another worker did after worker i was lost."""
    taken: set[int] = set()
    for (number, part), pushes in ledger.pushed.items():
        if part >= ledger.plan.workers:
            return "fail", f"worker-{pushes[0][0]} pushed from part {part}, but there are only {ledger.plan.workers}"
        for worker, _ in pushes:
            gone = ledger.replay.members.workers_lost.get(part)
            if worker != part and (gone is None or number < gone):
                return "fail", f"worker-{worker} pushed from part {part}, but worker-{part} is not recorded as lost"
            taken |= {part} if worker != part else set()
    changes = f"{counted(len(taken), 'part')} of the input taken over"
    return "pass", changes if taken else "every worker had its own part"


def _final(ledger: ServedLedger, number: int) -> Mapping[int, Pushed]:
    applied = ledger.applied.get(number, {})
    version = max((event.version for events in applied.values() for event in events), default=math.inf)
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
            return f"it was applied, but nothing was pushed from part {part}"
        final = pushed[part]
        for worker, push in ledger.pushed[number, part]:
            if push.version == final.version and (push.blocks, set(push.nodes)) != (final.blocks, set(final.nodes)):
                return f"worker-{worker} pushed other blocks from part {part} than another worker"
        if strange := set(final.nodes) - set(tenure.held):
            return f"part {part} was pushed to node-{min(strange)}, which held no blocks"
        if because := _misdirected(tenure, final):
            return because
    return _misapplied(ledger, number, tenure, pushed)


def _misdirected(tenure: Tenure, push: Pushed) -> str | None:
    held, count = tenure.together(tuple({*push.nodes})), push.blocks.count
    if len({*push.nodes}) < len(push.nodes) or not len(push.nodes) <= count <= held.count:
        return f"part {push.part} was pushed for {count} blocks to {len(push.nodes)} nodes that hold {held.count}"
    if count == held.count and push.blocks != held:
        return f"part {push.part} was pushed for {count} blocks other than those of its nodes"
    return None


def _misapplied(ledger: ServedLedger, number: int, tenure: Tenure, pushed: Mapping[int, Pushed]) -> str | None:
    for node, events in ledger.applied.get(number, {}).items():
        applied = sorted(part for event in events for part in event.parts)
        due = sorted(part for part, push in pushed.items() if node in push.nodes)
        if applied != due:
            parts, received = (", ".join(map(str, parts)) or "none" for parts in (applied, due))
            return f"node-{node} applied pushes from parts {parts}, but received {received}"
    declared = {part for dropped in ledger.replay.dropped.get(number, ()) for part in dropped.parts}
    silent = lacking(ledger, number, tenure)
    for part, push in pushed.items():
        if silent & set(push.nodes) and part not in declared:
            return f"the push from part {part} to node-{min(silent)} was neither applied nor declared dropped"
    return None
