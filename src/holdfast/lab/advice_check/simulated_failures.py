"""Simulated failures: their costs are predicted from the losses of a run without failures, then measured."""

from fractions import Fraction

from holdfast.advice.estimate import Estimate
from holdfast.blocks.policy import Policy
from holdfast.events import Event, Iterate, Serve, What
from holdfast.lab.advice_check.predicted_costs import AdviceCase
from holdfast.lab.experiment import Meter, Options
from holdfast.lab.partial.measure import measure
from holdfast.lab.partial.panels import PANELS
from holdfast.lab.simulate.strategy import Strategy
from holdfast.lab.simulate.trajectory import trajectory
from holdfast.server.advice import RECOVERIES, ServedCosts, iterations_lost, served_costs
from holdfast.workloads.workload import Workload

WORKLOADS = ("mlr-mnist", "mf-movielens", "lda-20news", "cnn-mnist-shard")  # panels; their quick workloads are used


def strategies(interval: int) -> dict[str, Strategy]:
    """Return the strategies to test, by name: full recovery, and partial recovery from full or priority checkpoints."""
    whole = Policy(ranking="full", interval=interval)
    part = Policy(ranking="priority", interval=interval, fraction=Fraction(1, interval))
    return {
        "full": Strategy(policy=whole, recovery="full", lost=Fraction(1)),
        "partial, 1/4 lost": Strategy(policy=whole, recovery="partial", lost=Fraction(1, 4)),
        "partial, 1/2 lost": Strategy(policy=whole, recovery="partial", lost=Fraction(1, 2)),
        "partial, 1/2 lost, priority": Strategy(policy=part, recovery="partial", lost=Fraction(1, 2)),
    }


def simulate_failures(options: Options, meter: Meter) -> list[AdviceCase]:
    """Simulate failures of every workload under every strategy, and return the predicted and measured costs."""
    trials = options.trial_count(full=40, quick=5)
    workloads = (PANELS[name].workload(None, quick=True) for name in WORKLOADS)
    return [case for workload in workloads for case in _cases(workload, options, trials, meter)]


def _cases(workload: Workload, options: Options, trials: int, meter: Meter) -> list[AdviceCase]:
    name, interval, wanted, cases = workload.name, options.interval, strategies(options.interval), []
    # The history that a parameter server would write with these losses, one iteration per second.
    losses = trajectory(workload).losses.tolist()
    plan = Serve(0, name, 1, 4, 1, 1, "full", "1", interval, "partial", 0, 0, losses[-1], len(losses))
    done: list[What] = [Iterate(at, loss, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0) for at, loss in enumerate(losses[1:])]
    costs = served_costs([Event(float(at), "controller", what) for at, what in enumerate([plan, *done])])
    (measured,) = measure(name, [workload], wanted.values(), options, trials, name, meter)
    for how, strategy in wanted.items():
        predicted = predicted_cost(costs, strategy)
        for step, cost in zip(measured.steps, measured.costs_of(strategy).cost, strict=True):
            where = f"after iteration {step}{', before the first save' if step < interval else ''}"
            cases.append(AdviceCase(name, where, how, "iterations", predicted, float(cost)))
    return cases


def predicted_cost(costs: ServedCosts, strategy: Strategy) -> Estimate:
    """Return the predicted cost of a failure under `strategy`, from the costs of a run without failures."""
    lost = float(strategy.lost) if strategy.recovery == RECOVERIES[0] else 1.0
    return iterations_lost(costs.interval, lost, costs.rate, costs.noise)
