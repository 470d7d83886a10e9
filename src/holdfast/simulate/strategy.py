"""What is done about failures, and the state from which training goes on once one has struck.

A trial is described by a strategy, the step of the failure and a number; everything random about it follows from the
number. So trials of the same number can be compared: they fail at the same step, lose blocks in the same order, and
draw the same random numbers afterwards.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from holdfast.blocks import Blocks, Ids, Norm
from holdfast.policy import Policy
from holdfast.recovery import recovery
from holdfast.simulate.ages import Renew, ages, recovered
from holdfast.simulate.lanes import Start
from holdfast.theory import partial_size
from holdfast.workloads.workload import Arrays


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


def stream(seed: int, number: int) -> int:
    """The stream of random numbers that a trial follows: 63 bits, so that no other trial or seed has the same."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0] >> np.uint64(1))


class CheckpointedRun:
    """A run with the running checkpoint that every policy would have kept of it.

    In go the states of the run, by iteration. Called with a trial, it gives the state from which the trial goes on;
    `renew` is the workload's rule for what was never saved, which recovery `fresh` needs.
    """

    def __init__(
        self,
        states: Sequence[Arrays],
        blocks: Blocks,
        norm: Norm,
        policies: Collection[Policy],
        seed: int,
        renew: Renew | None = None,
    ) -> None:
        self._states, self._blocks, self._norm, self._seed, self._renew = states, blocks, norm, seed, renew
        # 32 bits: the table of a large corpus has millions of entries
        self._ages = {policy: ages(states, blocks, norm, policy).astype(np.int32) for policy in policies}

    def __call__(self, trial: Trial) -> Start:
        """The state, the iteration and the stream from which a trial goes on once its lost blocks are back."""
        drawn = stream(self._seed, trial.number)
        if trial.strategy is None:
            return Start(self._states[trial.step], trial.step, drawn)
        return Start(self._recovered(trial, trial.strategy), trial.step, drawn)

    def size(self, trial: Trial) -> float:
        """How far recovery moves the state, ‖δ‖ of Theorem 3.2."""
        if trial.strategy is None:
            return 0.0
        after = self._recovered(trial, trial.strategy)
        distances = self._norm(self._blocks, self._states[trial.step], after)
        return partial_size(distances, recovery(trial.strategy.recovery)(len(self._blocks), self.lost(trial)))

    def lost(self, trial: Trial) -> Ids:
        """The lost blocks: the first so many of the number's own random order, so that a larger loss contains a smaller."""
        assert trial.strategy is not None
        count = len(self._blocks)
        order = np.random.default_rng((self._seed, trial.number)).permutation(count)
        return np.sort(order[: max(1, round(trial.strategy.lost * count))])

    def _recovered(self, trial: Trial, strategy: Strategy) -> Arrays:
        how, saved_at = recovery(strategy.recovery), self._ages[strategy.policy][trial.step]
        drawn, lost = stream(self._seed, trial.number), self.lost(trial)
        return recovered(self._states, self._blocks, saved_at, how, trial.step, lost, self._renew, drawn)
