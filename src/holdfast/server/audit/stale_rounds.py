"""Whether a run with staleness was right, in which nodes apply what is pushed as it comes, and workers are ahead of each other.

A node has one order in which it applied pushes, and that is what these checks go by: the clocks of machines differ. What
a part of the input pushes in a round names the same blocks whenever it is pushed again.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from holdfast.events import Applied, Pushed
from holdfast.finding import CannotTell, Verdict, counted
from holdfast.sampler.digest import Samples
from holdfast.server.audit.block_owners import adds_up, by_map
from holdfast.server.audit.server_ledger import ServedLedger, ServerWriter

MOST = 16  # applications of one push that may have been undone: beyond them there are too many cases
Applications: TypeAlias = Sequence[tuple[int, Applied]]


def nobody_was_too_far_ahead(ledger: ServedLedger) -> tuple[Verdict, str]:
    """No part of the input began an iteration before all others had come within the staleness of it."""
    plan, replay = ledger.plan, ledger.replay
    if not plan.staleness:
        return "pass", "all wait for each other after every round"
    ledger.require_nodes()
    furthest = 0
    for writer in ledger.writers:
        if writer.kind == "node":
            ahead, because = _ahead(ledger.told(*writer), plan.staleness)
            furthest = max(furthest, ahead)
            if because:
                return "fail", f"node-{writer.number} {because}"
    last = max((number // plan.rounds for number in ledger.applied), default=0)
    if last >= plan.iterations or (replay.done and last >= replay.iterations + plan.staleness):
        return "fail", f"iteration {last} was applied, and the run was done after {replay.iterations}"
    return "pass", f"at most {counted(furthest, 'iteration')} of {plan.staleness} that are allowed"


def _ahead(told: Sequence[object], staleness: int) -> tuple[int, str | None]:
    """How far a part was ahead of one whose push was applied after its own, and what is wrong with that."""
    newest = furthest = 0
    for what in told:
        if isinstance(what, Applied):
            newest = max(newest, what.iteration)
            furthest = max(furthest, newest - what.iteration)
            if furthest > staleness:
                return furthest, f"applied iteration {what.iteration} after iteration {newest}: {staleness} are allowed"
    return furthest, None


def applied_as_they_came(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Nodes applied pushes of one part at a time, to blocks that they held by the map of the push, and nothing is dropped."""
    rounds, count = ledger.plan.rounds, 0
    for number, by_node in sorted(ledger.applied.items()):
        for node, several in by_node.items():
            for each in several:
                count += 1
                if because := _misplaced(ledger, node, each):
                    return "fail", f"iteration {number // rounds} round {number % rounds}: node-{node} {because}"
    if ledger.replay.dropped:
        return "fail", "pushes are declared dropped, where each is applied as it comes or pushed again"
    return ("pass" if count else "unknown"), f"{count} times something was applied, each time to blocks of the node"


def _misplaced(ledger: ServedLedger, node: int, what: Applied) -> str | None:
    if len(what.parts) != 1 or what.parts[0] >= ledger.plan.workers:
        return "did not apply it for one part of the input"
    held = by_map(ledger.replay.tenures, what.version).held.get(node, Samples())
    if what.blocks.count > held.count or (what.blocks.count == held.count and what.blocks != held):
        return f"applied it to {what.blocks.count} blocks by map {what.version}, by which it holds {held.count}"
    return None


def pushed_as_they_came(ledger: ServedLedger) -> tuple[Verdict, str]:
    """What every part pushed in every round was applied once to each of its blocks, or again once these went back."""
    replay, rounds, count = ledger.replay, ledger.plan.rounds, 0
    ledger.require_nodes()
    applied = _by_part(ledger)
    for number in range(replay.iterations * rounds):
        for part in range(ledger.plan.workers):
            pushes = ledger.pushed.get((number, part), ())
            if because := _wrong(ledger, part, [push for _, push in pushes], applied.get((number, part), ())):
                return "fail", f"iteration {number // rounds} round {number % rounds}: {because}"
            count += 1
    return ("pass" if count else "unknown"), f"{count} {'push' if count == 1 else 'pushes'}, applied as they came"


def _by_part(ledger: ServedLedger) -> Mapping[tuple[int, int], Applications]:
    found: dict[tuple[int, int], list[tuple[int, Applied]]] = {}
    for number, by_node in ledger.applied.items():
        for node, several in by_node.items():
            for each in several:
                found.setdefault((number, each.parts[0] if each.parts else -1), []).append((node, each))
    return found


def _wrong(ledger: ServedLedger, part: int, pushes: Sequence[Pushed], applied: Applications) -> str | None:
    if not pushes:
        if ServerWriter("worker", part) not in ledger.writers:
            raise CannotTell(f"there is no history of worker-{part}")
        return f"nothing was pushed from part {part}"
    blocks = pushes[0].blocks
    if any(push.blocks != blocks for push in pushes):
        return f"part {part} was pushed again for other blocks"
    stays = [what.blocks for node, what in applied if not _may_be_undone(ledger, node, what)]
    undone = [what.blocks for node, what in applied if _may_be_undone(ledger, node, what)]
    if len(undone) > MOST:
        raise CannotTell(f"what was pushed from part {part} was applied and lost more than {MOST} times")
    if adds_up(blocks, stays, undone):
        return None
    found = Samples.total([*stays, *undone]).count
    if found > blocks.count and any(_is_split(ledger, node, what) for node, what in applied):
        raise CannotTell(
            f"what was pushed from part {part} was applied to blocks of which some went to a node that joined and some "
            "were lost: which is not on record"
        )
    return f"what was pushed from part {part} for {blocks.count} blocks was applied to {found}, each counted as often"


def _is_split(ledger: ServedLedger, node: int, what: Applied) -> bool:
    """Whether some of the blocks to which this was applied went to another node since, before nodes were lost."""
    return bool(ledger.replay.losses) and ledger.replay.gave.get(node, -1) > what.version


def _may_be_undone(ledger: ServedLedger, node: int, what: Applied) -> bool:
    """Whether blocks to which this was applied went back since: those of a lost node, or with full recovery all."""
    if ledger.plan.recovery == "full":
        return any(version > what.version for version in ledger.replay.went_back)
    return any(each.number == node for each in ledger.replay.losses)
