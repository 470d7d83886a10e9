"""The iteration costs of strategies on one workload: every trial, its perturbation and its bound."""

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from xxhash import xxh3_128

from holdfast.blocks import Floats, Ids
from holdfast.failure import geometric_steps
from holdfast.lab.experiment import Meter, Options
from holdfast.lab.journal import Journal
from holdfast.rate import Rate, fitted_rate
from holdfast.simulate.strategy import Case, Scene, Strategy
from holdfast.simulate.trajectory import Trajectory, proceed, trajectory
from holdfast.simulate.trials import iterations
from holdfast.theory import full_size, iteration_cost_bound
from holdfast.workloads.workload import Workload

BEYOND = 3  # the iterate this many times as far as the criterion stands for the optimum when c is estimated


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Trials of one strategy: the cost of each, the size of its perturbation, and its bound by Theorem 3.2.

    Costs are in fractions of an iteration; `whole` has them as the paper counts, in whole iterations.
    """

    cost: Floats
    whole: Floats
    size: Floats
    bound: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """All strategies on one workload; trial i of each has the same failure."""

    unperturbed: int
    steps: Ids
    rate: Rate
    concentration: float  # see `concentration`
    strategies: dict[Strategy, Costs]

    def of(self, strategy: Strategy) -> Costs:
        """The costs of a strategy, however it is written."""
        return self.strategies[strategy.canonical]


def measure(
    name: str,
    workload: Workload,
    strategies: Iterable[Strategy],
    options: Options,
    trials: int,
    journal: Path,
    meter: Meter,
) -> Measurement:
    """Run every strategy on the same failures: steps are geometric with mean half the unperturbed length."""
    wanted = list(dict.fromkeys(strategy.canonical for strategy in strategies))
    run = trajectory(workload, progress=meter(f"{name}: unperturbed run", 60))
    steps = geometric_steps(run.length / 2, run.length, trials, options.seed)
    scene = Scene(run, workload.blocks, workload.norm, {strategy.policy for strategy in wanted}, options.seed)
    plain: list[Strategy | None] = [None] if workload.stochastic else []
    cases = [Case(each, int(step), number) for each in [*plain, *wanted] for number, step in enumerate(steps)]
    counts = _counted(name, workload, scene, cases, options, journal, meter)
    rate = contraction(workload, run)
    crossed = run.crossed(workload.criterion)
    without = np.array([counts.get(Case(None, int(step), i), crossed - step) for i, step in enumerate(steps)])
    return Measurement(
        run.length,
        steps,
        rate,
        concentration(workload, run, options.interval),
        {each: _costs(each, scene, steps, counts, without, rate) for each in wanted},
    )


def _counted(
    name: str, workload: Workload, scene: Scene, cases: Sequence[Case], options: Options, path: Path, meter: Meter
) -> dict[Case, float]:
    """The iterations of every case, from the journal or run now."""
    keys = [_key(workload, scene, case) for case in cases]
    with closing(Journal(path)) as known:
        todo = list({key: i for i, key in enumerate(keys) if key not in known}.values())  # equal trials run once
        progress = meter(f"{name}: trials", len(cases))
        progress(len(cases) - len(todo))

        def done(trial: int, count: float) -> None:
            known.note(keys[todo[trial]], count)
            progress(1)

        if todo:
            open_cases = [cases[i] for i in todo]
            iterations(workload, open_cases, scene, limit=10 * scene.run.length, jobs=options.jobs, done=done)
        return {case: known[key] for case, key in zip(cases, keys, strict=True)}


def _key(workload: Workload, scene: Scene, case: Case) -> str:
    """What determines a trial: where it starts, to the last bit, and how far it goes.

    So a changed policy, seed or workload never meets an old result.
    """
    start = scene(case)
    luck = (start.iteration, start.stream) if workload.stochastic else ()
    digest = xxh3_128(repr((workload.name, workload.criterion, scene.run.losses.tobytes(), luck)).encode())
    for name, value in start.state.items():
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(value).data)
    return digest.hexdigest()


def _costs(
    strategy: Strategy, scene: Scene, steps: Ids, counts: dict[Case, float], without: Floats, rate: Rate
) -> Costs:
    cases = [Case(strategy, int(step), number) for number, step in enumerate(steps)]
    sizes = np.array([scene.size(case) for case in cases])
    bound = np.full(len(cases), np.nan)
    if rate.c < 1:
        bound = iteration_cost_bound(rate.c, rate.distance, sizes[:, None], steps[:, None])
    counted = np.array([counts[case] for case in cases])
    return Costs(counted - without, np.ceil(counted) - np.ceil(without), sizes, bound)


def contraction(workload: Workload, run: Trajectory) -> Rate:
    """The contraction rate, from the distances to an iterate far beyond the criterion."""
    far = proceed(workload, run.states[-1], run.length, BEYOND * run.length)
    return fitted_rate([full_size(workload.norm(workload.blocks, state, far)) for state in run.states], slice(0, None))


def concentration(workload: Workload, run: Trajectory, interval: int) -> float:
    """How much of the squared movement between two full checkpoints is that of the blocks that one small save could hold.

    The blocks that moved most a value come first, until they make up 1/interval of the values. Priority checkpoints help
    where this is near 1; not a number for a run shorter than the interval.
    """
    sizes, shares = workload.blocks.sizes, []
    for before, after in zip(run.states, run.states[interval:], strict=False):
        moved = np.square(workload.norm(workload.blocks, after, before))
        order = np.argsort(-moved / np.maximum(sizes, 1))
        held = np.cumsum(sizes[order]) <= sizes.sum() / interval
        shares.append(moved[order][held].sum() / moved.sum())
    return float(np.mean(shares)) if shares else float("nan")
