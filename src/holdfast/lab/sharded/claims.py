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
                f"`{strategy.name}`, {lost} of the ranks lost, a snapshot every {interval} steps: mean lag divided by "
                "the cost of a rollback"
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
            f"{age:.1f} steps with a snapshot every {interval} steps (the error is {spread / max(age, 1e-9):.0%} of this cost)"
        )
    return [
        f"The noise floor is {floor:.2g} steps: the root mean square of the lags after all weights were rounded to bfloat16, at "
        f"{len(costs.lags(NOISE))} points of training.",
        "If a strategy changes the weights more, its lag has a wider 95 % interval.",
        f"A lag that is larger than the noise floor has an error of about {spread:.1f} steps. This error is "
        "estimated from the rollbacks, because their exact cost is known: the age of the snapshot in steps. The measured lags "
        "of rollbacks differ from this cost by "
        f"{spread:.1f} steps (root mean square), and are {abs(errors.mean()):.1f} steps too "
        f"{'small' if errors.mean() < 0 else 'large'} on average. They differ because a trial (one failure with one strategy) "
        "does not repeat the batches of the undone steps after a rollback: it continues with the next batches of the "
        "undisturbed run.",
        f"The claims divide by the exact cost of a rollback. Its mean is {'; '.join(parts)}.",
        'In the table "Lag by strategy", the column "lag, steps" has the mean over all failures. Two other columns have the '
        "mean over the failures during the warm-up of the learning rate, and over the failures after it. The "
        '"rise of the loss" is the validation loss directly after the recovery, minus the loss of the undisturbed run at the '
        "same step.",
        "The bound in the table and in the last figure is an upper limit of the lag, by Theorem 3.2 of the SCAR paper. It "
        "depends on the distance between the recovered and the lost weights, on c (the factor by which each step reduces the "
        "distance to the optimum) and on D (the distance to the optimum at the start).",
        "Here the bound is only an estimate, and lags can be larger. The training does not meet the assumptions of the "
        "theorem, c and D are fitted to the undisturbed run, and the distance does not include the moments of AdamW.",
        _within_bound(costs),
    ]


def _within_bound(costs: MeasuredCosts) -> str:
    pairs = [(costs.known[lag_key(trial)], bound) for trial, bound in _perturbed_trials(costs)]
    inside = sum(cost <= bound for cost, bound in pairs)
    ratio = np.median([cost / bound for cost, bound in pairs]) if pairs else float("nan")
    return (
        f"In {inside} of the {len(pairs)} trials that change the weights, the lag is at most the bound. The median of lag "
        f"divided by bound, over these trials, is {ratio:.2f}."
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
    columns = ["strategy", "ranks lost", "steps between snapshots", "lag, steps", "from", "to"]
    columns += ["lag / cost of a rollback", "from", "to", "lag of failures in the warm-up, steps"]
    columns += ["lag of failures after the warm-up, steps", "rise of the loss", "bound, steps"]
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
        f"Repeated failures in runs of {costs.size.repeated_steps} steps, with a snapshot every "
        f"{costs.size.repeated_interval} steps: in each step, each rank fails with the chance in the first column"
    )
    return ResultTable(
        title, ["chance", "steps with a failure", "strategy", "final validation loss", "lag at the end, steps"], rows
    )


def _end(curve: LossCurve) -> LossCurve:
    first = len(curve.steps) - max(1, len(curve.steps) // END)
    return LossCurve(curve.steps[first:], curve.losses[first:])
