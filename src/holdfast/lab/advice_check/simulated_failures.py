"""Failures of simulated workloads: predicted from the losses of an unperturbed run, then measured."""

from collections.abc import Sequence
from fractions import Fraction

from holdfast.advice.estimate import Estimate
from holdfast.blocks.policy import Policy
from holdfast.events import Event, Iterate, Serve, What
from holdfast.lab.advice_check.predicted_costs import AdviceCase
from holdfast.lab.experiment import Meter, Options
from holdfast.lab.partial.comparison import trials_folder
from holdfast.lab.partial.measure import measure
from holdfast.lab.partial.panels import PANELS
from holdfast.lab.simulate.strategy import Strategy
from holdfast.lab.simulate.trajectory import trajectory
from holdfast.server.advice import RECOVERIES, ServedCosts, iterations_lost, served_costs
from holdfast.workloads.workload import Workload

WORKLOADS = ("mlr-mnist", "mf-movielens", "lda-20news", "cnn-mnist-shard")  # by panel; here their quick relatives


def strategies(interval: int) -> dict[str, Strategy]:
    """What is predicted, by name: all goes back, a part does, and a part does to saves of what moved most."""
    whole = Policy(ranking="full", interval=interval)
    part = Policy(ranking="priority", interval=interval, fraction=Fraction(1, interval))
    return {
        "full": Strategy(policy=whole, recovery="full", lost=Fraction(1)),
        "partial, 1/4 lost": Strategy(policy=whole, recovery="partial", lost=Fraction(1, 4)),
        "partial, 1/2 lost": Strategy(policy=whole, recovery="partial", lost=Fraction(1, 2)),
        "partial, 1/2 lost, priority": Strategy(policy=part, recovery="partial", lost=Fraction(1, 2)),
    }


def simulate_failures(options: Options, meter: Meter) -> list[AdviceCase]:
    """Every trial of every strategy on every workload as a case."""
    trials = options.count(full=40, quick=5)
    found: list[AdviceCase] = []
    for name in WORKLOADS:
        workload = PANELS[name].workload(None, quick=True)
        found += _cases(workload, options, trials, meter)
    return found


def _cases(workload: Workload, options: Options, trials: int, meter: Meter) -> list[AdviceCase]:
    wanted = strategies(options.interval)
    costs = served_costs(history_of_losses(workload.name, trajectory(workload).losses.tolist(), options.interval))
    journal = trials_folder(options) / f"advice-{workload.name}.jsonl"
    (measured,) = measure(workload.name, [workload], wanted.values(), options, trials, journal, meter)
    return [
        AdviceCase(
            workload.name,
            f"after iteration {step}{', before the first save' if step < options.interval else ''}",
            name,
            "iterations",
            predicted_cost(costs, strategy),
            float(cost),
        )
        for name, strategy in wanted.items()
        for step, cost in zip(measured.steps, measured.of(strategy).cost, strict=True)
    ]


def predicted_cost(costs: ServedCosts, strategy: Strategy) -> Estimate:
    """What is predicted of a strategy from the history of a run without a failure."""
    lost = float(strategy.lost) if strategy.recovery == RECOVERIES[0] else 1.0
    return iterations_lost(costs.interval, lost, costs.rate, costs.noise)


def history_of_losses(name: str, losses: Sequence[float], interval: int) -> list[Event]:
    """The history that a server would write of these losses, an iteration a second."""
    plan = Serve(0, name, 1, 4, 1, 1, "full", "1", interval, "partial", 0, 0, losses[-1], len(losses))
    done: list[What] = [Iterate(number, loss, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0) for number, loss in enumerate(losses[1:])]
    return [Event(float(at), "controller", what) for at, what in enumerate([plan, *done])]
