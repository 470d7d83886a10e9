"""What is done about failures, and what a trial starts from once a failure has struck.

A trial is described by a strategy, the step of the failure and a number; everything random about it follows from the
number, so trials of the same number are compared like with like: same step, same order of loss, same stream.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from holdfast.blocks import Blocks, Ids, Norm
from holdfast.policy import Policy
from holdfast.recovery import recovery
from holdfast.simulate.ages import ages, checkpoint, recovered
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


def stream(seed: int, number: int) -> int:
    """The stream of random numbers that a trial follows: 63 bits, so that no other trial or seed has the same."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0] >> np.uint64(1))


class Scene:
    """The states of a run with the running checkpoint of every policy: all that is needed to begin its cases."""

    def __init__(
        self, states: Sequence[Arrays], blocks: Blocks, norm: Norm, policies: Collection[Policy], seed: int
    ) -> None:
        self._states, self._blocks, self._norm, self._seed = states, blocks, norm, seed
        # 32 bits: the table of a large corpus has millions of entries
        self._ages = {policy: ages(states, blocks, norm, policy).astype(np.int32) for policy in policies}

    def __call__(self, case: Case) -> Start:
        """Where a case begins."""
        luck = stream(self._seed, case.number)
        if case.strategy is None:
            return Start(self._states[case.step], case.step, luck)
        how, saved_at = recovery(case.strategy.recovery), self._ages[case.strategy.policy][case.step]
        return Start(recovered(self._states, self._blocks, saved_at, how, case.step, self._lost(case)), case.step, luck)

    def size(self, case: Case) -> float:
        """How far recovery moves the state, ‖δ‖ of Theorem 3.2."""
        if case.strategy is None:
            return 0.0
        saved = checkpoint(self._states, self._blocks, self._ages[case.strategy.policy][case.step])
        distances = self._norm(self._blocks, self._states[case.step], saved)
        return partial_size(distances, recovery(case.strategy.recovery)(len(self._blocks), self._lost(case)))

    def _lost(self, case: Case) -> Ids:
        """The lost blocks: the first so many of the number's own random order, so that a larger loss contains a smaller."""
        assert case.strategy is not None
        count = len(self._blocks)
        order = np.random.default_rng((self._seed, case.number)).permutation(count)
        return np.sort(order[: max(1, round(case.strategy.lost * count))])
