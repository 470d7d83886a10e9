"""The claims of sharded-tradeoff, fixed before its runs; its tables; and remarks on what the measurement resolves."""

from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from holdfast.lab import confidence
from holdfast.lab.result import Claim, ResultTable, Value
from holdfast.lab.sharded.lag import LossCurve, lag
from holdfast.lab.sharded.measured_costs import MeasuredCosts
from holdfast.lab.sharded.shard_failures import (
    AVERAGED,
    COMPUTED,
    EARLY,
    FRESH,
    LATE,
    NOISE,
    REPEATED,
    SHADOW,
    STRATEGIES,
    WHOLE,
    ShardStrategy,
    ShardTrial,
    repeated_failures,
)
from holdfast.lab.sharded.trial_keys import lag_key

SOURCE = "our goal, fixed before the runs"
AT_MOST = (  # the most that a recovery may cost, as a part of what a rollback costs
    (WHOLE, Fraction(1, 8), 0.15),
    (WHOLE, Fraction(1, 4), 0.3),
    (WHOLE, Fraction(1, 2), 0.6),
    (FRESH, Fraction(1, 8), 0.03),
    (FRESH, Fraction(1, 2), 0.06),
    (AVERAGED, Fraction(1, 2), 0.12),
)
END = 4  # a long run's distance behind the undisturbed run is measured over the last quarter of its losses


def claims(costs: MeasuredCosts) -> list[Claim]:
    """Return every claim, one for each snapshot interval, with its measured value."""
    made = []
    for strategy, lost, most in AT_MOST:
        for interval in costs.size.intervals:
            words = (
                f"`{strategy.name}`, {lost} of the ranks lost, a snapshot every {interval} steps: lag divided by the cost "
                "of a rollback"
            )
            ident = f"{strategy.name}-{lost.numerator}-of-{lost.denominator}-every-{interval}"
            made.append(Claim.of_estimate(ident, words, SOURCE, (None, most), costs.ratio(strategy, lost, interval)))
    shadows = np.concatenate([costs.lags(SHADOW, lost) for lost in SHADOW.losses])
    floor = costs.noise_floor
    words = f"`{SHADOW.name}`: mean lag in steps, within the noise floor of {floor:.2g} steps"
    return [*made, Claim.of_estimate("replay-exact", words, SOURCE, (-floor, floor), confidence.mean(shadows))]


def remarks(costs: MeasuredCosts) -> list[str]:
    """Return sentences on the noise of the estimate, and on what Theorem 3.2 says about the costs."""
    floor, errors = costs.noise_floor, costs.rollback_errors()
    spread = float(np.sqrt(np.mean(np.square(errors))))
    parts = []
    for interval in costs.size.intervals:
        age = float(costs.ages(interval).mean())
        parts.append(
            f"{age:.1f} steps with a snapshot every {interval} steps (the error is {spread / max(age, 1e-9):.0%} of it)"
        )
    return [
        f"Noise floor: {floor:.2g} steps. It is the lag of runs in which nothing is lost and all weights are only rounded to "
        f"bfloat16 (root mean square over {len(costs.lags(NOISE))} points of training). Strategies that change the weights "
        "more scatter more, as their 95 % intervals show.",
        f"Error of a large lag: {spread:.1f} steps. The exact cost of a rollback is known: it is the age of the snapshot. "
        f"Measured lags of rollbacks differ from it by {spread:.1f} steps (root mean square), and by {errors.mean():+.1f} "
        "steps on average, because a rollback trains on other batches than the steps that it repeats. Claims divide by the "
        "exact cost.",
        f"Mean exact cost of a rollback: {'; '.join(parts)}.",
        "Bound: Theorem 3.2 of the SCAR paper computes an upper limit of the cost. It depends on the distance between the "
        "recovered and the lost weights, on c (the factor by which each step reduces the distance to the optimum) and on D "
        "(the distance to the optimum at the start).",
        _within_bound(costs),
        "Nothing is proved here: training does not meet the assumptions of the theorem, c and D are fitted to the undisturbed "
        "run, and the distance leaves out the moments of the optimizer.",
    ]


def _within_bound(costs: MeasuredCosts) -> str:
    pairs = [(costs.known[lag_key(trial)], bound) for trial, bound in _perturbed_trials(costs)]
    inside = sum(cost <= bound for cost, bound in pairs)
    ratio = np.median([cost / bound for cost, bound in pairs]) if pairs else float("nan")
    return (
        f"In {inside} of {len(pairs)} trials that change the weights, the measured cost is at most the bound. The median cost "
        f"is {ratio:.2f} of the bound."
    )


def _perturbed_trials(costs: MeasuredCosts) -> Iterator[tuple[ShardTrial, float]]:
    """Yield the trials that perturb the weights, each with the bound of Theorem 3.2 on its cost."""
    for strategy in STRATEGIES:
        for lost, interval in _cases(costs, strategy):
            for trial in costs.trials(strategy, lost, interval):
                if strategy not in (NOISE, SHADOW) and (bound := costs.bound(trial)) > 0:
                    yield trial, bound


def _cases(costs: MeasuredCosts, strategy: ShardStrategy) -> list[tuple[Fraction, int]]:
    """Return the lost fractions and snapshot intervals with which `strategy` was measured."""
    return [
        (lost, interval)
        for lost in strategy.losses
        for interval in (costs.size.intervals if strategy.needs_snapshot else (0,))
    ]


def tables(costs: MeasuredCosts) -> list[ResultTable]:
    """Return the costs of single failures, and the state of the long runs at their end."""
    rows = [_cost_row(costs, strategy, *case) for strategy in STRATEGIES for case in _cases(costs, strategy)]
    columns = ["strategy", "lost", "snapshot every", "lag, steps", "from", "to", "lag / rollback", "from", "to"]
    columns += ["lag in the warm-up", "lag after it", "jump of the loss", "bound, steps"]
    single = ResultTable(
        "Lag by strategy: steps behind the undisturbed run, with 95 % intervals (from, to)", columns, rows
    )
    return [single, _repeated_table(costs)]


def _cost_row(costs: MeasuredCosts, strategy: ShardStrategy, lost: Fraction, interval: int) -> list[Value]:
    lags, trials = costs.lags(strategy, lost, interval), costs.trials(strategy, lost, interval)
    early, late = (float(costs.lags(strategy, lost, interval, phase).mean()) for phase in (EARLY, LATE))
    ratio: tuple[Value, ...] = tuple(costs.ratio(strategy, lost, interval)) if interval else (None, None, None)
    jump = float(np.mean([costs.known[f"{trial.key}/jump"] for trial in trials]))
    bound = float(np.mean([costs.bound(trial) for trial in trials]))
    place: list[Value] = [f"{strategy.name}: {strategy.words}", str(lost) if lost else None, interval or None]
    return [*place, *confidence.mean(lags), *ratio, early, late, jump, bound]


def _repeated_table(costs: MeasuredCosts) -> ResultTable:
    rows: list[list[Value]] = []
    seeds = range(costs.size.repeated_seeds)
    for rate in costs.size.rates:
        lost = [repeated_failures(costs.size, costs.seed, seed, rate) for seed in seeds]
        count = float(np.mean([sum(bool(ranks) for ranks in run) for run in lost]))
        for strategy in (*COMPUTED, *REPEATED):
            curves = [costs.repeated(seed, rate, strategy) for seed in seeds]
            final = float(np.mean([curve.losses[-1] for curve in curves]))
            behind = [lag(costs.curve(seed), _end(curve)) for seed, curve in zip(seeds, curves, strict=True)]
            rows.append([rate, count, strategy.name, final, float(np.mean(behind))])
    title = (
        f"Repeated failures, {costs.size.repeated_steps} steps, snapshot every {costs.size.repeated_interval}: each rank "
        "fails in each step with the given chance"
    )
    return ResultTable(
        title, ["chance", "steps with a failure", "strategy", "final validation loss", "steps behind"], rows
    )


def _end(curve: LossCurve) -> LossCurve:
    first = len(curve.steps) - max(1, len(curve.steps) // END)
    return LossCurve(curve.steps[first:], curve.losses[first:])
