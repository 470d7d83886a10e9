"""What the controller of a served run tells, followed line by line: who takes part, who holds what, what is saved.

Everything that cannot be so is a complaint, by the topic to which it belongs; checks say what came of it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import takewhile
from typing import Any

import numpy as np

from holdfast.blocks.policy import Policy
from holdfast.errors import BadInput
from holdfast.events import Chosen, Commit, Done, Dropped, Iterate, Joined, Lost, Moved, Restored, Serve, Struck, What
from holdfast.finding import CannotTell
from holdfast.sampler.digest import Samples
from holdfast.server.audit.block_owners import (
    NOBODY,
    Blocks,
    RunningSaves,
    SaveChoice,
    Tenure,
    adds_up,
    first_owners,
    numbers,
)


class Replay:
    """A served run as it stands after what was taken so far."""

    def __init__(self, plan: Serve, told: Sequence[What], nodes: Mapping[int, Sequence[What]]) -> None:
        self.plan = plan
        self._chosen = {each.iteration for each in told if isinstance(each, Chosen)}
        self._returns = {(each.node, each.version) for each in told if isinstance(each, Restored)}
        self.wrong: defaultdict[str, list[str]] = defaultdict(list)
        self.tenures: list[Tenure] = []
        self.iterations = self.restored = self.unsaved = self.saved = 0
        self.losses: list[Lost] = []
        self.gave: dict[int, int] = {}  # by node, the version of the last map by which it gave blocks away
        self.went_back: set[int] = set()  # versions of maps under which blocks came back from their saves
        self.dropped: defaultdict[int, list[Dropped]] = defaultdict(list)
        self.workers_lost: dict[int, int] = {}  # by worker, the number of the round from which on it is gone
        self.ever = {"node": set(range(plan.nodes)), "worker": set(range(plan.workers))}
        self.done: Done | None = None
        self.loss: float | None = None
        self.saves = RunningSaves(plan.blocks)
        self.unseen = False  # whether a controller was lost, and things happened of which it could not tell
        self._there = {kind: set(members) for kind, members in self.ever.items()}
        self._choices = {node: _choices(told) for node, told in nodes.items()}
        self._restores = {node: [each for each in told if isinstance(each, Restored)] for node, told in nodes.items()}
        self._owners = np.full(plan.blocks, NOBODY)
        self._told_lost = np.zeros(plan.blocks, bool)
        self._came_back = np.ones(plan.blocks, bool)
        self._version, self._life, self._open_round = 0, -1, 0
        self._changed = False
        self._to_leave: set[int] = set()  # nodes whose blocks are lost, so that they must be
        self._to_get: set[int] = set()  # nodes that have joined, and must get blocks
        self._struck: set[tuple[str, int]] = set()
        self._policy = _policy(plan)
        for index, what in enumerate(told):
            self._take(what, (told[later] for later in range(index + 1, len(told))))

    def _take(self, what: What, ahead: Iterable[What]) -> None:
        """Follow the next line; `ahead` is what comes after it."""
        if self.done and isinstance(what, (Chosen, *_HANDLERS)) and not isinstance(what, Serve):
            self._complain("ends", f"the controller was done, and then told of {type(what).__name__.lower()}")
        if isinstance(what, Chosen):
            self._choose(what, ahead)
        elif handler := _HANDLERS.get(type(what)):
            handler(self, what)

    def _serve(self, what: Serve) -> None:
        if what.attempt <= self._life:
            self._complain("ends", f"the controller lived twice under the number {what.attempt}")
        self._life, self.done = what.attempt, None  # it may die when all is done, before it could say so to anybody
        self._struck.discard(("controller", 0))
        if self._life:
            self.unseen = True
            self._find_unseen()

    def _find_unseen(self) -> None:
        """What nodes did, and no controller told of."""
        step = self.iterations + 1
        by_node = {node: found[0] for node in self._there["node"] if (found := self._chosen_by(node, step))}
        if by_node and step not in self._chosen | self.saves.committed:
            self.saves.choose(step, SaveChoice(self._owners.copy(), by_node))
        for node in sorted(self._there["node"]):
            for told in self._restores.get(node, ()):
                if (node, told.version) not in self._returns and self._is_unseen(told):
                    self._restore_to(node, told)

    def _is_unseen(self, told: Restored) -> bool:
        ids = numbers(told.blocks, self.plan.blocks)
        return (
            told.version > self._version
            and self._is_open(told.iteration * self.plan.rounds + told.round)
            and ids is not None
            and bool((self._told_lost[ids] | (self.plan.recovery == "full")).all())
        )

    def _lose(self, what: Lost) -> None:
        self._struck.discard((what.kind, what.number))
        at = what.iteration * self.plan.rounds + what.round
        if what.kind == "worker":
            self.workers_lost.setdefault(what.number, at)
        if what.kind == "controller":
            return
        if what.number not in self._there.get(what.kind, ()) and not self.unseen:
            self._complain("losses", f"{what.kind}-{what.number} was lost, and took no part")
        self._there[what.kind].discard(what.number)
        if what.kind == "node":
            self._to_leave.discard(what.number)
            self._lose_blocks(what, at)

    def _lose_blocks(self, what: Lost, at: int) -> None:
        if what.version > self._open_round and not (self.unseen and self.orphans):
            self._settle()  # rounds were applied since nodes were lost before
        self.saves.lose(what.number)
        held = np.flatnonzero(self._owners == what.number)
        self._owners[held] = NOBODY
        ids = self._ids(what.blocks, "losses", f"node-{what.number} is told to have lost")
        if ids is None:
            return
        if (len(ids) or not self.unseen) and len(kept_quiet := np.setdiff1d(held, ids)):
            self._complain("losses", f"node-{what.number} held block {kept_quiet[0]} when it was lost, and nobody told")
        if not len(ids):
            return
        if not self.tenures:
            self._complain("losses", f"node-{what.number} lost blocks before there were any")
        if len(elsewhere := ids[self._owners[ids] != NOBODY]) and self.unseen:
            self._to_leave |= set(self._owners[elsewhere].tolist())
            self._owners[elsewhere] = NOBODY
        elif len(elsewhere):
            other = int(self._owners[elsewhere[0]])
            self._complain(
                "losses", f"block {elsewhere[0]}, told to be lost with node-{what.number}, was on node-{other}"
            )
            return
        if not (at <= what.version <= at + 1 and self._is_open(what.version)):
            where = f"iteration {what.iteration} round {what.round}"
            self._complain(
                "losses", f"node-{what.number}, lost in {where}, cannot have waited for round {what.version}"
            )
        self.losses.append(what)
        self._told_lost[ids] = True
        self._open_round = what.version
        if self.plan.recovery == "full":
            self._came_back[:] = False

    def _is_open(self, number: int) -> bool:
        rounds = self.plan.rounds
        return self.iterations * rounds <= number <= (self.iterations + 1) * rounds

    def _restore(self, what: Restored) -> None:
        if self._restore_to(what.node, what):
            self._compare_with_node(what)

    def _restore_to(self, node: int, what: Restored) -> bool:
        ids = self._ids(what.blocks, "restores", f"node-{node} is told to have restored")
        if ids is None or len(what.saved_at) != len(ids):
            self._complain("restores", f"node-{node} does not tell a save for each block that it restored")
            return False
        if what.version < self._version or node not in self._there["node"]:
            self._complain("owners", f"node-{node} restored blocks by map {what.version}, in which it has no place")
        lost = (self._owners[ids] == NOBODY) & self._told_lost[ids]
        goes_back = (self._owners[ids] == node) & ~self._came_back[ids]  # with full recovery everything does
        if len(kept := ids[~(lost | goes_back)]):
            self._complain("losses", f"block {kept[0]} came back to node-{node}, and nobody told of its loss")
        self._check_saves(node, ids, np.asarray(what.saved_at, np.int64))
        self._owners[ids] = node
        self._told_lost[ids] = False
        self._came_back[ids] = True
        self._version, self._changed = max(what.version, self._version), True
        self.restored += len(ids)
        self.unsaved += sum(saved_at == 0 for saved_at in what.saved_at)
        self.went_back.add(what.version)
        return True

    def _check_saves(self, node: int, ids: Blocks, saved_at: Blocks) -> None:
        newest = self.saves.saved_at[ids]
        if len(other := np.flatnonzero(saved_at != newest)) and self.saves.unclear is None:
            block, said, should = (int(array[other[0]]) for array in (ids, saved_at, newest))
            self._complain(
                "restores",
                f"block {block} came back to node-{node} from the save of iteration {said}, and the newest that was "
                f"committed is of iteration {should}",
            )

    def _compare_with_node(self, what: Restored) -> None:
        """What the controller says must be what the node says."""
        own = [told for told in self._restores.get(what.node, ()) if told.version == what.version]
        if not any(
            (told.node, set(zip(told.blocks, told.saved_at, strict=False)))
            == (what.node, set(zip(what.blocks, what.saved_at, strict=False)))
            for told in own
        ):
            said = "other blocks or saves" if own else "nothing"
            self._complain(
                "restores",
                f"node-{what.node} tells of {said} where the controller says what came back by map {what.version}",
            )

    def _move(self, what: Moved) -> None:
        self._settle()
        ids = self._ids(what.blocks, "owners", f"node-{what.source} is told to have given away")
        if ids is None:
            return
        if len(others := ids[self._owners[ids] != what.source]):
            self._complain("owners", f"block {others[0]} went from node-{what.source}, which did not hold it")
        if what.target not in self._there["node"] or what.version < self._version or what.iteration != self.iterations:
            self._complain(
                "owners", f"blocks went to node-{what.target} by map {what.version}, in which it has no place"
            )
        self._owners[ids] = what.target
        self.gave[what.source] = what.version
        self._version, self._changed, self._open_round = what.version, True, self.iterations * self.plan.rounds

    def _join(self, what: Joined) -> None:
        if what.kind not in self.ever or what.number in self.ever[what.kind]:
            self._complain("owners", f"{what.kind}-{what.number} joined, and had taken part before")
            return
        self.ever[what.kind].add(what.number)
        self._there[what.kind].add(what.number)
        if what.kind == "node":
            self._to_get.add(what.number)

    def _choose(self, what: Chosen, ahead: Iterable[What]) -> None:
        self._settle()
        self._require_committed()
        if what.iteration != self.iterations + 1 or not self._policy.due(what.iteration):
            self._complain("saves", f"blocks were chosen for iteration {what.iteration}, when no save was due")
        soon = takewhile(lambda each: not isinstance(each, Iterate), ahead)
        lost = {each.number for each in soon if isinstance(each, Lost) and each.kind == "node"}
        by_node: dict[int, Samples] = {}
        for node in sorted(self._there["node"]):
            told = self._chosen_by(node, what.iteration)
            if len(told) != 1 and node not in lost:
                self._complain(
                    "saves", f"node-{node} chose {len(told)} times for the save of iteration {what.iteration}"
                )
            by_node |= {node: told[0]} if told else {}
        always = [by_node[node] for node in by_node if node not in lost]
        if not adds_up(what.blocks, always, [by_node[node] for node in by_node if node in lost]):
            self._complain("saves", f"nodes chose other blocks for iteration {what.iteration} than the controller says")
        self.saves.choose(what.iteration, SaveChoice(self._owners.copy(), by_node), lost)

    def _chosen_by(self, node: int, iteration: int) -> list[Samples]:
        return self._choices.get(node, {}).get(iteration, [])

    def _commit(self, what: Commit) -> None:
        self.saved += not what.found
        if what.step == 0 and not self.tenures:
            self._begin()
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

    def _begin(self) -> None:
        """Everything is dealt out and saved as it is before the first iteration."""
        try:
            self._owners = first_owners(self.plan.blocks, self._there["node"], self.plan.seed)
        except BadInput as error:
            raise CannotTell(f"who held which blocks at the start cannot be told: {error}") from error
        self.saves.saved_at[:] = 0
        self.tenures.append(Tenure(0, 0, self._owners.copy()))

    def _drop(self, what: Dropped) -> None:
        self._settle()
        number = what.iteration * self.plan.rounds + what.round
        if not self.tenures or not self._is_open(number):
            self._complain(
                "losses", f"pushes of iteration {what.iteration} were dropped in iteration {self.iterations}"
            )
        self.dropped[number].append(what)

    def _iterate(self, what: Iterate) -> None:
        self._settle()
        self._require_shares()
        if what.iteration != self.iterations:
            self._complain("ends", f"iteration {what.iteration} was done where {self.iterations} was due")
        if self.is_converged:
            self._complain(
                "ends", f"iteration {what.iteration} was done though the loss was below the criterion before"
            )
        if self._policy.due(what.iteration + 1) and what.iteration + 1 not in self.saves.choices:
            self._complain("saves", f"a save was due after iteration {what.iteration}, and no blocks were chosen")
        self.iterations, self.loss, self.unseen = what.iteration + 1, what.loss, False
        if self.iterations > self.plan.iterations:
            self._complain("ends", f"{self.iterations} iterations were done, and {self.plan.iterations} allowed")

    @property
    def is_converged(self) -> bool:
        """Whether the loss is below the criterion."""
        return self.loss is not None and self.loss < self.plan.criterion

    @property
    def orphans(self) -> int:
        """How many blocks nobody holds."""
        return int(np.count_nonzero(self._owners == NOBODY)) if self.tenures else 0

    def _strike(self, what: Struck) -> None:
        ever = self.ever.get(what.kind, {0} if what.kind == "controller" else set())
        if strange := sorted({*what.targets} - ever):
            self._complain("losses", f"{what.kind:.40}-{strange[0]} was killed on purpose, and never took part")
        there = self._there.get(what.kind, {0})
        self._struck |= {(what.kind, target) for target in what.targets if target in there}

    def _end(self, what: Done) -> None:
        self._settle()
        self._require_committed()
        self.done = what
        if self._struck:
            kind, number = min(self._struck)
            self._complain("losses", f"{kind}-{number} was killed on purpose, and nobody told of its loss")

    def _settle(self) -> None:
        """Nobody is lost at the moment: every block must have an owner."""
        if not self.tenures:
            self._complain("owners", "the run went on before all blocks were saved for the first time")
            return
        if len(missing := np.flatnonzero(self._owners == NOBODY)):
            self._complain("losses", f"block {missing[0]} was lost and did not come back ({len(missing)} such)")
        elif len(missing := np.flatnonzero(~self._came_back)):
            self._complain("losses", f"block {missing[0]} did not come back, as all must with full recovery")
        if self._to_leave:
            self._complain("losses", f"blocks of node-{min(self._to_leave)} were lost, and it was not")
        self._came_back[:], self._to_leave = True, set()
        if self._changed:
            if self.tenures[-1].start == self._open_round and not self.plan.staleness:
                self.tenures.pop()  # no round was applied by it; where pushes are applied as they come, some may be
            self.tenures.append(Tenure(self._open_round, self._version, self._owners.copy()))
            self._changed = False

    def _require_shares(self) -> None:
        """Every node that has joined, and is not lost, holds blocks."""
        if idle := (self._to_get & self._there["node"]) - set(self._owners.tolist()):
            self._complain("owners", f"node-{min(idle)} joined, and got no blocks")
        self._to_get = set()

    def _require_committed(self) -> None:
        if waiting := self.saves.waiting():
            self._complain("saves", f"what node-{waiting[1]} chose for iteration {waiting[0]} was never committed")

    def _ids(self, blocks: Sequence[int], topic: str, what: str) -> Blocks | None:
        ids = numbers(blocks, self.plan.blocks)
        if ids is None:
            self._complain(topic, f"{what} blocks that do not exist, or one twice")
        return ids

    def _complain(self, topic: str, because: str) -> None:
        self.wrong[topic].append(because)


def _choices(told: Sequence[What]) -> dict[int, list[Samples]]:
    """By iteration, what a node chose to save."""
    found: defaultdict[int, list[Samples]] = defaultdict(list)
    for each in told:
        if isinstance(each, Chosen):
            found[each.iteration].append(each.blocks)
    return dict(found)


def _policy(plan: Serve) -> Policy:
    try:
        fraction = Fraction(plan.fraction)
        return Policy(ranking=plan.policy, interval=plan.interval, fraction=fraction, saves=plan.saves)
    except (BadInput, ValueError, ZeroDivisionError) as error:
        raise CannotTell(f"the plan of the controller says nothing that can be saved: {error}") from error


_HANDLERS: Mapping[type, Callable[[Replay, Any], None]] = {
    Serve: Replay._serve,
    Lost: Replay._lose,
    Restored: Replay._restore,
    Moved: Replay._move,
    Joined: Replay._join,
    Commit: Replay._commit,
    Dropped: Replay._drop,
    Iterate: Replay._iterate,
    Struck: Replay._strike,
    Done: Replay._end,
}
