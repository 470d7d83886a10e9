"""Checkpoint strategies: the blocks they have saved, and the state from which training continues after a failure.

A block is a part of the model's state that is saved or lost as a whole. Trials with the same number fail at the same
step, lose blocks in the same order, and draw the same random numbers afterwards, so they can be compared. A checkpoint
is kept as the iteration of each block's last save; the values are in the trajectory.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeAlias

import numpy as np

from holdfast.blocks.division import Blocks, Ids, Norm
from holdfast.blocks.policy import BlockInfo, Policy
from holdfast.blocks.recoveries import Recovery, recover, recovery, unsaved
from holdfast.lab.simulate.lanes import Start
from holdfast.theory.bounds import partial_size
from holdfast.workloads.workload import Arrays

Renew: TypeAlias = Callable[[Arrays, Ids, Ids, int, int], Arrays]
"""A function that returns new values for blocks that were never saved, packed. Its arguments: the state at the failure,
all lost blocks, the lost blocks that were never saved, the next iteration and the seed of random numbers."""


def last_saved(states: Sequence[Arrays], blocks: Blocks, norm: Norm, policy: Policy) -> Ids:
    """Simulate the saves of `policy`, and return an array with the newest save of each block after each iteration.

    Entry [k, b] is the iteration of the newest save of block b, as of iteration k."""
    saved = {name: value.copy() for name, value in states[0].items()}
    zeros = {name: np.zeros_like(value) for name, value in saved.items()}
    saved_at = np.zeros(len(blocks), dtype=np.int64)
    credit = Fraction(0)
    rows = [saved_at.copy()]
    for step, state in enumerate(states[1:], start=1):
        if policy.due(step):
            info = BlockInfo(norm(blocks, state, saved), norm(blocks, state, zeros), saved_at, blocks.sizes)
            ids, credit = policy.choose(step, info, credit)
            blocks.copy(state, saved, ids)
            saved_at[ids] = step
        rows.append(saved_at.copy())
    return np.array(rows)


def recovered_state(
    states: Sequence[Arrays],
    blocks: Blocks,
    saved_at: Ids,
    how: Recovery,
    step: int,
    lost: Ids,
    renew: Renew | None = None,
    stream: int = 0,
) -> Arrays:
    """Return the state after the blocks `lost` are lost at the end of iteration `step` and recovered by `how`.

    `saved_at` has the iteration of each block's last save. `renew` computes values for blocks that were never
    saved, with random numbers seeded by `stream`."""
    live = {name: value.copy() for name, value in states[step].items()}
    saved = checkpoint_state(states, blocks, saved_at)
    if len(ids := unsaved(how, saved_at, lost)):
        assert renew is not None, "recovery 'fresh' needs the workload's rule"
        blocks.unpack(renew(live, lost, ids, step, stream), ids, saved)
    recover(how, blocks, live, saved, lost)
    return live


def checkpoint_state(states: Sequence[Arrays], blocks: Blocks, saved_at: Ids) -> Arrays:
    """Return a state in which block i has its value after iteration `saved_at[i]`, copied from `states`."""
    saved = {name: value.copy() for name, value in states[0].items()}
    for iteration in np.unique(saved_at):
        blocks.copy(states[iteration], saved, np.flatnonzero(saved_at == iteration))
    return saved


DRAWN = ("random",)  # rankings that choose blocks by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A policy for saving blocks (parts of the state), a recovery method, and the fraction of blocks to be lost."""

    policy: Policy
    recovery: str
    lost: Fraction

    @property
    def canonical(self) -> "Strategy":
        """The representative of all strategies with the same effect, such as full recovery if all blocks are lost."""
        policy = self.policy
        if policy.fraction == 1:
            policy = replace(policy, ranking="full", seed=0)
        if self.recovery == "full" or self.lost == 1:
            return Strategy(policy=policy, recovery="full", lost=Fraction(1))
        return Strategy(policy=policy, recovery=self.recovery, lost=self.lost)


@dataclass(frozen=True, slots=True)
class Trial:
    """A simulated run with a failure after iteration `step`, or without a failure; `number` seeds its random draws."""

    strategy: Strategy | None
    step: int
    number: int


def trial_stream(seed: int, number: int) -> int:
    """Return a random seed for the training in trial `number`, derived from the experiment's `seed`."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def loss_order(seed: int, number: int, blocks: int) -> Ids:
    """Return the ids of all blocks in the random order in which trial `number` loses them."""
    return np.random.default_rng((seed, number)).permutation(blocks)


def lost_count(blocks: int, fraction: Fraction) -> int:
    """Return how many of `blocks` blocks a failure of the given `fraction` loses: at least one."""
    return max(1, round(fraction * blocks))


def lost_in_trial(seed: int, number: int, blocks: int, fraction: Fraction) -> Ids:
    """Return the ids of the blocks that trial `number` loses.

    A larger `fraction` loses the same blocks and additional blocks."""
    return np.sort(loss_order(seed, number, blocks)[: lost_count(blocks, fraction)])


class CheckpointedRun:
    """A run without failures, and the checkpoint that each policy would have had after every iteration.

    Call it with a trial to get the state from which the trial continues after its failure. `order` is the order of the
    norm over block distances. `renew` gives values to blocks that were never saved, for the recovery "fresh"."""

    def __init__(
        self,
        states: Sequence[Arrays],
        blocks: Blocks,
        norm: Norm,
        policies: Collection[Policy],
        seed: int,
        order: float = 2,
        renew: Renew | None = None,
    ) -> None:
        self._states, self._blocks, self._norm, self._seed, self._order = states, blocks, norm, seed, order
        self._renew = renew
        # 32 bits, because the table of a large corpus has millions of entries
        self._last_saved = {
            policy: last_saved(states, blocks, norm, policy).astype(np.int32)
            for policy in policies
            if policy.ranking not in DRAWN
        }
        self._drawn: dict[Trial, Ids] = {}

    def __call__(self, trial: Trial) -> Start:
        """Return the state, the iteration and the random seed with which `trial` continues after its failure."""
        stream = trial_stream(self._seed, trial.number)
        if trial.strategy is None:
            return Start(self._states[trial.step], trial.step, stream)
        return Start(self._recovered(trial, trial.strategy), trial.step, stream)

    def perturbation_size(self, trial: Trial) -> float:
        """Return how far the recovery moves the state: ‖δ‖ in Theorem 3.2 of the SCAR paper."""
        if trial.strategy is None:
            return 0.0
        distances = self._norm(self._blocks, self._states[trial.step], self._recovered(trial, trial.strategy))
        restored = recovery(trial.strategy.recovery)(len(self._blocks), self.lost(trial))
        return partial_size(distances, restored, self._order)

    def lost(self, trial: Trial) -> Ids:
        assert trial.strategy is not None
        return lost_in_trial(self._seed, trial.number, len(self._blocks), trial.strategy.lost)

    def _recovered(self, trial: Trial, strategy: Strategy) -> Arrays:
        how, stream, policy = recovery(strategy.recovery), trial_stream(self._seed, trial.number), strategy.policy
        if policy.ranking not in DRAWN:
            saved_at = np.asarray(self._last_saved[policy][trial.step])
        else:
            if trial not in self._drawn:
                own, states = replace(policy, seed=stream), self._states[: trial.step + 1]
                self._drawn[trial] = last_saved(states, self._blocks, self._norm, own)[-1]
            saved_at = self._drawn[trial]
        lost = self.lost(trial)
        return recovered_state(self._states, self._blocks, saved_at, how, trial.step, lost, self._renew, stream)
