"""What is done about failures, and what a trial starts from once a failure has struck.

A trial is described by a strategy, the step of the failure and a number; everything random about it follows from the
number, so trials of the same number are compared like with like: same step, same order of loss, same stream.
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from holdfast.blocks import Blocks, Ids, Norm
from holdfast.policy import Policy
from holdfast.recovery import recovery
from holdfast.simulate.ages import ages, checkpoint, recovered
from holdfast.simulate.lanes import Start
from holdfast.simulate.trajectory import Trajectory
from holdfast.theory import partial_size


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
            policy = Policy(ranking="full", interval=policy.interval)
        if self.recovery == "full" or self.lost == 1:
            return Strategy(policy=policy, recovery="full", lost=Fraction(1))
        return Strategy(policy=policy, recovery=self.recovery, lost=self.lost)


@dataclass(frozen=True, slots=True)
class Case:
    """One trial: a failure at a step, under a strategy; without a strategy nothing fails."""

    strategy: Strategy | None
    step: int
    number: int


class Scene:
    """A trajectory with the running checkpoint of every policy: all that is needed to begin any case."""

    def __init__(self, run: Trajectory, blocks: Blocks, norm: Norm, policies: set[Policy], seed: int) -> None:
        self.run, self._blocks, self._norm, self._seed = run, blocks, norm, seed
        # 32 bits: the table of a large corpus has millions of entries, and travels to every process
        self._ages = {policy: ages(run, blocks, norm, policy).astype(np.int32) for policy in policies}

    def __call__(self, case: Case) -> Start:
        """Where a case begins; streams are numbered from 1, as the trajectory follows stream 0."""
        if case.strategy is None:
            return Start(self.run.states[case.step], case.step, case.number + 1)
        how, saved_at = recovery(case.strategy.recovery), self._ages[case.strategy.policy][case.step]
        state = recovered(self.run, self._blocks, saved_at, how, case.step, self._lost(case))
        return Start(state, case.step, case.number + 1)

    def size(self, case: Case) -> float:
        """How far recovery moves the state, ‖δ‖ of Theorem 3.2."""
        if case.strategy is None:
            return 0.0
        saved = checkpoint(self.run, self._blocks, self._ages[case.strategy.policy][case.step])
        distances = self._norm(self._blocks, self.run.states[case.step], saved)
        return partial_size(distances, recovery(case.strategy.recovery)(len(self._blocks), self._lost(case)))

    def _lost(self, case: Case) -> Ids:
        """The lost blocks: the first so many of the number's own random order, so that a larger loss contains a smaller."""
        assert case.strategy is not None
        count = len(self._blocks)
        order = np.random.default_rng((self._seed, case.number)).permutation(count)
        return np.sort(order[: max(1, round(case.strategy.lost * count))])
