"""What is done about failures, and the state from which training goes on once one has struck.

A trial is described by a strategy, the step of the failure and a number; everything random about it follows from the
number. So trials of the same number can be compared: they fail at the same step, lose blocks in the same order, and
draw the same random numbers afterwards.

The running checkpoint of a policy along a trajectory, kept as ages: at which iteration each block was last saved.

The values themselves are in the trajectory, so one table of small numbers serves every trial, whatever it loses.
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
"""From the state at a failure, the lost blocks, those of them that were never saved, the iteration that is next and the
stream of random numbers, to new values of the blocks that were never saved, packed."""


def last_saved(states: Sequence[Arrays], blocks: Blocks, norm: Norm, policy: Policy) -> Ids:
    """Row k, column b: the iteration at which block b of the running checkpoint was saved, once iteration k is done."""
    saved = {name: value.copy() for name, value in states[0].items()}
    nothing = {name: np.zeros_like(value) for name, value in saved.items()}
    saved_at = np.zeros(len(blocks), dtype=np.int64)
    credit = Fraction(0)
    rows = [saved_at.copy()]
    for step, state in enumerate(states[1:], start=1):
        if policy.due(step):
            standing = BlockInfo(norm(blocks, state, saved), norm(blocks, state, nothing), saved_at, blocks.sizes)
            ids, credit = policy.choose(step, standing, credit)
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
    """The state with which training goes on after losing blocks once iteration `step` is done.

    `saved_at` is the row of `ages` for that step; recovery `fresh` asks `renew` for what was never saved.
    """
    live = {name: value.copy() for name, value in states[step].items()}
    saved = checkpoint_state(states, blocks, saved_at)
    if len(ids := unsaved(how, saved_at, lost)):
        assert renew is not None, "recovery 'fresh' needs the workload's rule"
        blocks.unpack(renew(live, lost, ids, step, stream), ids, saved)
    recover(how, blocks, live, saved, lost)
    return live


def checkpoint_state(states: Sequence[Arrays], blocks: Blocks, saved_at: Ids) -> Arrays:
    """The running checkpoint in which each block has the value of the iteration it was saved at."""
    saved = {name: value.copy() for name, value in states[0].items()}
    for iteration in np.unique(saved_at):
        blocks.copy(states[iteration], saved, np.flatnonzero(saved_at == iteration))
    return saved


DRAWN = ("random",)  # rankings that choose blocks by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How blocks are saved, which fraction of them a failure takes, and how they come back."""

    policy: Policy
    recovery: str
    lost: Fraction

    @property
    def canonical(self) -> "Strategy":
        """The same strategy in one way of writing: saving everything ranks nothing, losing everything is full."""
        policy = self.policy
        if policy.fraction == 1:
            policy = replace(policy, ranking="full", seed=0)
        if self.recovery == "full" or self.lost == 1:
            return Strategy(policy=policy, recovery="full", lost=Fraction(1))
        return Strategy(policy=policy, recovery=self.recovery, lost=self.lost)


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial: a failure at a step, under a strategy; without a strategy nothing fails."""

    strategy: Strategy | None
    step: int
    number: int


def trial_stream(seed: int, number: int) -> int:
    """The stream of random numbers that a trial follows: 63 bits, so that no other trial or seed has the same."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def lost_in_trial(seed: int, number: int, blocks: int, fraction: Fraction) -> Ids:
    """Which of so many blocks the trial of a number loses: the first of a random order that the number alone decides.

    So a larger loss contains a smaller one.
    """
    order = np.random.default_rng((seed, number)).permutation(blocks)
    return np.sort(order[: max(1, round(fraction * blocks))])


class CheckpointedRun:
    """A run with the running checkpoint that every policy would have kept of it.

    In go the states of the run, by iteration. Called with a trial, it gives the state from which the trial goes on.
    A policy that draws its blocks at random draws others in every trial. `order` is that of the norm, as `full_size` has it;
    `renew` is the workload's rule for what was never saved, which recovery `fresh` needs.
    """

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
        # 32 bits: the table of a large corpus has millions of entries
        self._ages = {
            policy: last_saved(states, blocks, norm, policy).astype(np.int32)
            for policy in policies
            if policy.ranking not in DRAWN
        }
        self._drawn: dict[Trial, Ids] = {}

    def __call__(self, trial: Trial) -> Start:
        """The state, the iteration and the stream from which a trial goes on once its lost blocks are back."""
        drawn = trial_stream(self._seed, trial.number)
        if trial.strategy is None:
            return Start(self._states[trial.step], trial.step, drawn)
        return Start(self._recovered(trial, trial.strategy), trial.step, drawn)

    def size(self, trial: Trial) -> float:
        """How far recovery moves the state, ‖δ‖ of Theorem 3.2."""
        if trial.strategy is None:
            return 0.0
        distances = self._norm(self._blocks, self._states[trial.step], self._recovered(trial, trial.strategy))
        restored = recovery(trial.strategy.recovery)(len(self._blocks), self.lost(trial))
        return partial_size(distances, restored, self._order)

    def lost(self, trial: Trial) -> Ids:
        """The numbers of the blocks that a trial loses."""
        assert trial.strategy is not None
        return lost_in_trial(self._seed, trial.number, len(self._blocks), trial.strategy.lost)

    def _recovered(self, trial: Trial, strategy: Strategy) -> Arrays:
        """The state once its lost blocks are back."""
        how, drawn = recovery(strategy.recovery), trial_stream(self._seed, trial.number)
        saved_at, lost = self._saved_at(trial), self.lost(trial)
        return recovered_state(self._states, self._blocks, saved_at, how, trial.step, lost, self._renew, drawn)

    def _saved_at(self, trial: Trial) -> Ids:
        """For every block the iteration at which it was last saved before the failure."""
        assert trial.strategy is not None
        policy = trial.strategy.policy
        if policy.ranking not in DRAWN:
            return np.asarray(self._ages[policy][trial.step])
        if trial not in self._drawn:
            own = replace(policy, seed=trial_stream(self._seed, trial.number))
            self._drawn[trial] = last_saved(self._states[: trial.step + 1], self._blocks, self._norm, own)[-1]
        return self._drawn[trial]
