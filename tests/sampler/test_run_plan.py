"""The plan of a run with several phases: the positions of its steps."""

import numpy as np
import pytest

from holdfast.sampler.plan import SamplePlan
from holdfast.sampler.run_plan import RunPlan

PHASES = (SamplePlan(samples=70, batch=7, epochs=2, seed=1), SamplePlan(samples=23, batch=5, epochs=3, seed=2))


@pytest.mark.parametrize("count", [1, 2])
def test_the_positions_of_many_steps_are_those_of_each_step(count: int) -> None:
    plan = RunPlan(PHASES[:count])
    steps = np.arange(plan.steps)
    epochs, cursors = plan.positions(steps)
    assert [*zip(epochs, cursors, strict=True)] == [plan.position(step) for step in steps.tolist()]
