"""Replay the controller's history line by line: which members take part, which node holds which block, what is saved.

Contradictions are kept as messages by topic; the checks turn the topics into findings. Only finished iterations are
judged: a run that was interrupted may have done more in its last iteration than it recorded.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Literal, TypeAlias

import numpy as np

from holdfast.blocks.policy import Policy
from holdfast.errors import BadInput
from holdfast.events import Chosen, Commit, Done, Dropped, Iterate, Joined, Lost, Moved, Restored, Serve, Struck, What
from holdfast.finding import CannotTell
from holdfast.sampler.digest import Samples
from holdfast.server.audit.block_owners import NOBODY, Blocks, Ownership, Tenure, adds_up, numbers
from holdfast.server.audit.committed_saves import CommittedSaves, RecordedChoices, SaveChoice

Topic: TypeAlias = Literal["ends", "losses", "owners", "restores", "saves"]


class ReplayedMembers:
    """The nodes and workers of a run at one point of its replayed history, and the processes killed on purpose."""

    def __init__(self, nodes: int, workers: int) -> None:
        self.ever = {"node": set(range(nodes)), "worker": set(range(workers))}
        self.present = {kind: set(members) for kind, members in self.ever.items()}
        self.nodes = self.present["node"]
        self.workers_lost: dict[int, int] = {}  # by worker, the number of the first round without it
        self.struck: set[tuple[str, int]] = set()  # killed on purpose, and not recorded as lost yet
        self.to_receive: set[int] = set()  # nodes that have joined and must receive blocks
        self.to_lose: set[int] = set()  # nodes whose blocks are recorded as lost, so the nodes must be lost too


class Replay:
    """The state of a run at the current point of its replayed history, and the contradictions found in the history."""

    def __init__(self, plan: Serve, policy: Policy, recorded: RecordedChoices) -> None:
        self.plan, self._policy, self._recorded = plan, policy, recorded
        self.wrong: defaultdict[Topic, list[str]] = defaultdict(list)
        self._lost_soon: set[int] = set()  # nodes that are lost before the current iteration ends
        self._in_open_iteration: list[tuple[Topic, str]] = []  # contradictions that count once the iteration ends
        self.members = ReplayedMembers(plan.nodes, plan.workers)
        self.ownership = Ownership(plan.blocks)
        self.saves = CommittedSaves(plan.blocks)
        self.losses: list[Lost] = []
        self.dropped: defaultdict[int, list[Dropped]] = defaultdict(list)
        self.gave: dict[int, int] = {}  # by node, the version of the last map by which it gave blocks away
        self.went_back: set[int] = set()  # versions of maps under which blocks came back from their saves
        self.iterations = self.restored = self.unsaved = 0
        self.loss: float | None = None
        self.done: Done | None = None
        # True after a controller was lost, until the next iteration: it may not have recorded everything.
        self.is_taken_over = False
        self._life = -1

    @property
    def tenures(self) -> list[Tenure]:
        return self.ownership.tenures

    @property
    def is_converged(self) -> bool:
        return self.loss is not None and self.loss < self.plan.criterion

    def take(self, what: What, lost_soon: set[int]) -> None:
        """Replay the controller's event `what`; the nodes `lost_soon` are lost before the current iteration ends."""
        kind = type(what).__name__.lower()
        if handle := getattr(self, f"_on_{kind}", None):
            if self.done and kind != "serve":
                self._complain("ends", f"the controller recorded {kind} after the run was done")
            self._lost_soon = lost_soon
            handle(what)

    def _on_serve(self, what: Serve) -> None:
        if what.attempt <= self._life:
            self._complain("ends", f"two controllers started as number {what.attempt}")
        self._life, self.done = what.attempt, None  # a controller may die between its last line and its answer
        self.members.struck.discard(("controller", 0))
        if not self._life:
            return
        # Take the choices and restores that nodes recorded and the lost controller did not.
        self.is_taken_over = True
        step, nodes = self.iterations + 1, self.members.nodes
        by_node = {node: chosen[0] for node in nodes if (chosen := self._recorded.chosen_by.get((node, step)))}
        if by_node and step not in self._recorded.chosen | self.saves.committed:
            self.saves.choose(step, SaveChoice(self.ownership.owners.copy(), by_node))
        for node in sorted(nodes):
            for restore in self._recorded.restores_of[node]:
                if (node, restore.version) not in self._recorded.restored and self._may_follow(restore):
                    self._restore_to(node, restore)

    def _may_follow(self, restore: Restored) -> bool:
        ids = numbers(restore.blocks, self.plan.blocks)
        return (
            restore.version > self.ownership.version
            and self._is_open(restore.iteration * self.plan.rounds + restore.round)
            and ids is not None
            and bool((self.ownership.is_declared_lost[ids] | ~self.ownership.has_come_back[ids]).all())
        )

    def _on_lost(self, what: Lost) -> None:
        members = self.members
        members.struck.discard((what.kind, what.number))
        at = what.iteration * self.plan.rounds + what.round
        if what.kind == "worker":
            members.workers_lost.setdefault(what.number, at)
        if what.kind == "controller":
            return
        if what.number not in members.present.get(what.kind, ()) and not self.is_taken_over:
            self._complain("losses", f"{what.kind}-{what.number} was lost, but it took no part")
        members.present[what.kind].discard(what.number)
        if what.kind == "node":
            members.to_lose.discard(what.number)
            self._lose_blocks(what, at)

    def _lose_blocks(self, what: Lost, at: int) -> None:
        ownership, node = self.ownership, f"node-{what.number}"
        if what.version > ownership.open_round and not (self.is_taken_over and ownership.orphans):
            self._continue()  # rounds were applied since nodes were lost before
        self.saves.lose(what.number)
        held = np.flatnonzero(ownership.owners == what.number)
        ownership.owners[held] = NOBODY
        ids = self._ids(what.blocks, "losses", f"the loss of {node} names")
        if ids is None:
            return
        if (len(ids) or not self.is_taken_over) and len(unnamed := np.setdiff1d(held, ids)):
            self._complain("losses", f"{node} held block {unnamed[0]} when it was lost, which its loss does not name")
        if not len(ids):
            return
        if not self.tenures:
            self._complain("losses", f"{node} lost blocks before any were dealt out")
        if len(elsewhere := ids[ownership.owners[ids] != NOBODY]) and self.is_taken_over:
            self.members.to_lose |= set(ownership.owners[elsewhere].tolist())
            ownership.owners[elsewhere] = NOBODY
        elif len(elsewhere):
            other = int(ownership.owners[elsewhere[0]])
            self._complain("losses", f"block {elsewhere[0]}, recorded as lost with {node}, was on node-{other}")
            return
        if not (at <= what.version <= at + 1 and self._is_open(what.version)):
            lost_in = f"iteration {what.iteration} round {what.round}"
            self._complain("losses", f"{node}, lost in {lost_in}, cannot have waited for round {what.version}")
        self.losses.append(what)
        ownership.is_declared_lost[ids] = True
        ownership.open_round = what.version
        if self.plan.recovery == "full":
            ownership.has_come_back[:] = False

    def _is_open(self, number: int) -> bool:
        return self.iterations * self.plan.rounds <= number <= (self.iterations + 1) * self.plan.rounds

    def _on_restored(self, what: Restored) -> None:
        if not self._restore_to(what.node, what):
            return
        own = [restore for restore in self._recorded.restores_of[what.node] if restore.version == what.version]
        saves = set(zip(what.blocks, what.saved_at, strict=False))
        if not any(r.node == what.node and set(zip(r.blocks, r.saved_at, strict=False)) == saves for r in own):
            recorded = f"node-{what.node} recorded {'other blocks or saves' if own else 'nothing'}"
            self._complain("restores", f"{recorded} for the controller's restore by map {what.version}")

    def _restore_to(self, node: int, what: Restored) -> bool:
        ownership = self.ownership
        ids = self._ids(what.blocks, "restores", f"the restore of node-{node} names")
        if ids is None or len(what.saved_at) != len(ids):
            self._complain("restores", f"the restore of node-{node} does not name a save for each block")
            return False
        if what.version < ownership.version or node not in self.members.nodes:
            self._complain("owners", f"node-{node} restored blocks by map {what.version}, in which it has no place")
        lost = (ownership.owners[ids] == NOBODY) & ownership.is_declared_lost[ids]
        goes_back = (ownership.owners[ids] == node) & ~ownership.has_come_back[ids]  # by full recovery
        if len(kept := ids[~(lost | goes_back)]):
            self._complain("losses", f"block {kept[0]} came back to node-{node}, but its loss is not recorded")
        saved_at, newest = np.asarray(what.saved_at, np.int64), self.saves.saved_at[ids]
        if len(differing := np.flatnonzero(saved_at != newest)) and self.saves.unclear is None:
            block, used, expected = (int(array[differing[0]]) for array in (ids, saved_at, newest))
            came_back = f"block {block} came back to node-{node} from the save of iteration {used}"
            self._complain("restores", f"{came_back}, but the newest committed save is of iteration {expected}")
        ownership.restore(node, ids, what.version)
        self.restored += len(ids)
        self.unsaved += sum(saved_at == 0 for saved_at in what.saved_at)
        self.went_back.add(what.version)
        return True

    def _on_moved(self, what: Moved) -> None:
        self._continue()
        ownership = self.ownership
        ids = self._ids(what.blocks, "owners", f"the move from node-{what.source} names")
        if ids is None:
            return
        if len(others := ids[ownership.owners[ids] != what.source]):
            self._complain("owners", f"block {others[0]} moved from node-{what.source}, which did not hold it")
        is_late = what.version < ownership.version or what.iteration != self.iterations
        if what.target not in self.members.nodes or is_late:
            moved = f"blocks moved to node-{what.target} by map {what.version}"
            self._complain("owners", f"{moved}, in which it has no place")
        ownership.move(what.target, ids, what.version, self.iterations * self.plan.rounds)
        self.gave[what.source] = what.version

    def _on_joined(self, what: Joined) -> None:
        members = self.members
        if what.kind not in members.ever or what.number in members.ever[what.kind]:
            self._complain("owners", f"{what.kind}-{what.number} joined, but had taken part before")
            return
        members.ever[what.kind].add(what.number)
        members.present[what.kind].add(what.number)
        if what.kind == "node":
            members.to_receive.add(what.number)

    def _on_chosen(self, what: Chosen) -> None:
        lost_soon = self._lost_soon
        self._continue()
        self._require_committed()
        step = what.iteration
        if step != self.iterations + 1 or not self._policy.due(step):
            self._complain("saves", f"blocks were chosen for iteration {step}, when no save was due")
        by_node: dict[int, Samples] = {}
        for node in sorted(self.members.nodes):
            chosen = self._recorded.chosen_by[node, step]
            if len(chosen) != 1 and node not in lost_soon:
                self._complain("saves", f"node-{node} chose {len(chosen)} times for the save of iteration {step}")
            by_node |= {node: chosen[0]} if chosen else {}
        always = [by_node[node] for node in by_node if node not in lost_soon]
        if not adds_up(what.blocks, always, [by_node[node] for node in by_node if node in lost_soon]):
            self._complain("saves", f"nodes chose other blocks for iteration {step} than the controller recorded")
        self.saves.choose(step, SaveChoice(self.ownership.owners.copy(), by_node), lost_soon)

    def _on_commit(self, what: Commit) -> None:
        self.saves.commits += what.is_new
        if what.step == 0 and not self.tenures:  # all blocks are dealt out, and saved before the first iteration
            try:
                self.ownership.deal(self.members.nodes, self.plan.seed)
            except BadInput as error:
                raise CannotTell(f"the first owners of blocks cannot be computed: {error}") from error
            self.saves.saved_at[:] = 0
        if not what.blocks:
            if what.step:
                self.saves.commit_unclear(what.step)
            return
        ids = self._ids(what.blocks, "saves", f"the save of iteration {what.step} has")
        if ids is None or what.step == 0:
            if ids is not None and not what.found and len(ids) < self.plan.blocks:
                self._complain("saves", f"the first save has {len(ids)} of {self.plan.blocks} blocks")
            return
        if because := self.saves.commit(what.step, ids):
            self._complain("saves", because)

    def _on_dropped(self, what: Dropped) -> None:
        self._continue()
        number = what.iteration * self.plan.rounds + what.round
        if not self.tenures or not self._is_open(number):
            dropped = f"pushes of iteration {what.iteration}"
            self._complain("losses", f"{dropped} were dropped in iteration {self.iterations}")
        self.dropped[number].append(what)

    def _on_iterate(self, what: Iterate) -> None:
        self._continue()
        waiting = self.members.to_receive & self.members.nodes
        if idle := waiting - set(self.ownership.owners.tolist()):
            self._complain("owners", f"node-{min(idle)} joined, but received no blocks")
        self.members.to_receive.clear()
        if what.iteration != self.iterations:
            self._complain("ends", f"iteration {what.iteration} was done where {self.iterations} was due")
        if self.is_converged:
            self._complain("ends", f"iteration {what.iteration} was done, but the loss was below the criterion before")
        if self._policy.due(what.iteration + 1) and what.iteration + 1 not in self.saves.choices:
            self._complain("saves", f"a save was due after iteration {what.iteration}, but no blocks were chosen")
        self.iterations, self.loss, self.is_taken_over = what.iteration + 1, what.loss, False
        if self.iterations > self.plan.iterations:
            self._complain("ends", f"{self.iterations} iterations were done, and {self.plan.iterations} allowed")
        self._judge()

    def _on_struck(self, what: Struck) -> None:
        members = self.members
        ever = members.ever.get(what.kind, {0} if what.kind == "controller" else set())
        if strange := sorted({*what.targets} - ever):
            self._complain("losses", f"{what.kind:.40}-{strange[0]} was killed on purpose, but never took part")
        present = members.present.get(what.kind, {0})
        members.struck |= {(what.kind, target) for target in what.targets if target in present}

    def _on_done(self, what: Done) -> None:
        self._continue()
        self._require_committed()
        self.done = what
        if self.members.struck:
            kind, number = min(self.members.struck)
            self._complain("losses", f"{kind}-{number} was killed on purpose, but its loss is not recorded")
        self._judge()

    def _continue(self) -> None:
        if not self.tenures:
            self._complain("owners", "the run continued before all blocks were saved for the first time")
            return
        if len(missing := np.flatnonzero(self.ownership.owners == NOBODY)):
            self._complain("losses", f"block {missing[0]} was lost and did not come back ({len(missing)} such)")
        elif len(missing := np.flatnonzero(~self.ownership.has_come_back)):
            self._complain("losses", f"block {missing[0]} did not come back, as all must with full recovery")
        if to_lose := self.members.to_lose:
            self._complain("losses", f"blocks of node-{min(to_lose)} were lost, but the node was not")
            to_lose.clear()
        # Where pushes are applied as they come, some may have been applied by a map that no round ended with.
        self.ownership.close(keep_all=self.plan.staleness > 0)

    def _require_committed(self) -> None:
        if waiting := self.saves.waiting():
            chosen = f"the blocks that node-{waiting[1]} chose for iteration {waiting[0]}"
            self._complain("saves", f"{chosen} were never committed")

    def _ids(self, blocks: Sequence[int], topic: Topic, subject: str) -> Blocks | None:
        ids = numbers(blocks, self.plan.blocks)
        if ids is None:
            self._complain(topic, f"{subject} blocks that do not exist, or one twice")
        return ids

    def _complain(self, topic: Topic, because: str) -> None:
        self._in_open_iteration.append((topic, because))
        if self.done:
            self._judge()

    def _judge(self) -> None:
        for topic, because in self._in_open_iteration:
            self.wrong[topic].append(because)
        self._in_open_iteration.clear()


def replay_controller(plan: Serve, lines: Sequence[What], nodes: Mapping[int, Sequence[What]]) -> Replay:
    """Replay the controller's events `lines` of a run with settings `plan`, and compare them with the nodes' events."""
    try:
        fraction = Fraction(plan.fraction)
        policy = Policy(ranking=plan.policy, interval=plan.interval, fraction=fraction, saves=plan.saves)
    except (BadInput, ValueError, ZeroDivisionError) as error:
        raise CannotTell(f"the controller's plan has a policy that cannot save anything: {error}") from error
    replay = Replay(plan, policy, RecordedChoices(lines, nodes))
    for what, lost_soon in zip(lines, _lost_soon(lines), strict=True):
        replay.take(what, lost_soon)
    return replay


def _lost_soon(lines: Sequence[What]) -> list[set[int]]:
    lost: set[int] = set()
    result = []
    for what in reversed(lines):
        result.append(lost)
        if isinstance(what, Iterate):
            lost = set()
        elif isinstance(what, Lost) and what.kind == "node":
            lost = lost | {what.number}
    return result[::-1]
