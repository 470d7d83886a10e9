"""Figures 3, 5 and 6 of the SCAR paper: measured costs of perturbations against their bound, on three models.

qp-bound perturbs a quadratic program, mlr-bound and mlr-reset logistic regression, and lda-reset a topic model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Floats
from holdfast.blocks.policy import Policy
from holdfast.faults.schedule import lost_blocks
from holdfast.lab.bounds import cost_bound
from holdfast.lab.bounds.cost_bound import PerturbedTrials, cost_figure, printed_form_remark, within_claim
from holdfast.lab.experiment import Experiment, Meter, Options, Progress, per_trial
from holdfast.lab.result import Claim, Result
from holdfast.lab.simulate.lanes import (
    Start,
    Trajectory,
    continue_training,
    iterations_to_criterion,
    start_as_given,
    trajectory,
)
from holdfast.lab.simulate.strategy import CheckpointedRun, Strategy, Trial
from holdfast.theory.bounds import adversarial, gaussian
from holdfast.theory.rate import Rate, worst_rate
from holdfast.workloads.mlr import LogisticRegression, mlr
from holdfast.workloads.qp import QuadraticProgram
from holdfast.workloads.workload import Arrays, Clock, norm_order, stacked, unstacked

QP_STEP = 500  # the single perturbation strikes here; many perturbations strike at every iteration before it
MLR_STEP = 50
BEYOND = 10  # the optimum is unknown, so the iterate this many times as far as the criterion takes its place
FRACTIONS = tuple(Fraction(n, 10) for n in range(1, 11))  # of the documents that are reset
NEVER = Policy(ranking="full", interval=10**9)  # saves nothing, so lost blocks return to the start


def run_qp(options: Options, meter: Meter) -> Result:
    """Run the experiment qp-bound: measure the cost of single, repeated and adversarial perturbations."""
    trials = options.trial_count(full=1000, quick=100)
    program = QuadraticProgram(seed=options.seed)
    unperturbed = trajectory(program)
    rate = worst_rate(unperturbed.losses)
    rng = np.random.default_rng(options.seed)
    progress = meter("qp-bound", 2 * trials + trials // 10)

    def costs(starts: list[Arrays]) -> Floats:
        begun = [Start(state, QP_STEP) for state in starts]
        counts = iterations_to_criterion(program, begun, start_as_given, limit=10_000, done=per_trial(progress))
        return QP_STEP + np.ceil(counts) - unperturbed.length

    x, left, at = unperturbed.states[QP_STEP]["x"], unperturbed.losses[QP_STEP], np.array([QP_STEP])
    # From a hundredth to ten times the distance left; a 4-D normal vector is about 2 long.
    deltas = left / 2 * 10 ** rng.uniform(-2, 1, size=(trials, 1)) * rng.normal(size=(trials, 4))
    many, many_starts = _perturb_often(program, rate, unperturbed, trials, rng)
    sizes = left * np.geomspace(0.5, 10, max(trials // 10, 1))
    away = [{"x": x + adversarial(x, program.optimum, size)} for size in sizes]
    single = np.linalg.norm(deltas, axis=1)[:, None]
    groups = [
        PerturbedTrials("one perturbation", single, at, costs([{"x": x + delta} for delta in deltas])),
        PerturbedTrials("many perturbations", many, np.arange(QP_STEP), costs(many_starts)),
        PerturbedTrials("adversarial", sizes[:, None], at, costs(away)),
    ]
    length = "iterations of the unperturbed run, set to be roughly 1,000"
    tight = "smallest cost of an adversarial perturbation, as a fraction of its bound"
    closest = float(groups[-1].closeness(rate).min())
    negative = float(np.mean(groups[0].costs < 0))
    return Result(
        experiment="qp-bound",
        config={"seed": options.seed, "trials": trials, "step": QP_STEP, "criterion": program.criterion, "c": rate.c},
        rows=[row for group in groups for row in group.rows(rate)],
        claims=[
            Claim("unperturbed", length, "figure 3", (800, 1200), unperturbed.length),
            *(within_claim(g, rate, "Theorem 3.2, figure 3", 0.999) for g in groups),
            Claim("tight", tight, "tightness, after Theorem 3.2", (0.9, None), closest),
        ],
        remarks=[
            printed_form_remark(groups, rate, float(unperturbed.losses[0])),
            f"{negative:.0%} of single random perturbations have a negative cost: they happen to move towards the optimum.",
        ],
        figures={
            "qp-bound": cost_figure(groups, rate, "Iteration cost of perturbations: gradient descent on a 4-D QP")
        },
        captions={"qp-bound": cost_bound.CAPTION},
    )


def _perturb_often(
    program: QuadraticProgram, rate: Rate, run: Trajectory, trials: int, rng: np.random.Generator
) -> tuple[Floats, list[Arrays]]:
    scale = run.losses[QP_STEP] / 2 * (1 - rate.c) * 10 ** rng.uniform(-2, 1, size=(trials, 1, 1))
    deltas = scale * rng.normal(size=(trials, QP_STEP, 4))
    stack = stacked([program.start()] * trials)
    clock = Clock(*np.zeros((2, trials), dtype=np.int64))  # the program draws no random numbers
    for k in range(QP_STEP):
        stack = program.advance({"x": stack["x"] + deltas[:, k].T}, clock)
    return np.linalg.norm(deltas, axis=2), [unstacked(stack, lane) for lane in range(trials)]


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """A run without perturbations, with its approximate optimum and its rate of convergence."""

    workload: LogisticRegression
    run: Trajectory
    optimum: npt.NDArray[Any]
    rate: Rate

    @property
    def weights(self) -> npt.NDArray[Any]:
        return self.run.states[MLR_STEP]["weights"]

    def distance(self, weights: npt.NDArray[Any]) -> float:
        return float(np.linalg.norm(weights - self.optimum))

    def trials(
        self, kind: str, deltas: Sequence[Floats], sizes: Floats, options: Options, progress: Progress
    ) -> PerturbedTrials:
        """Run a trial for each delta: add it to the weights at iteration `MLR_STEP`, and train to convergence.

        `sizes` has the norms of `deltas`, and `kind` names the trials in tables and figures."""
        starts = [Start({"weights": (self.weights + delta).astype(np.float32)}, MLR_STEP) for delta in deltas]
        limit, done = 20 * self.run.length, per_trial(progress)
        counts = iterations_to_criterion(
            self.workload, starts, start_as_given, limit=limit, jobs=options.jobs, done=done
        )
        return PerturbedTrials(kind, sizes[:, None], np.array([MLR_STEP]), MLR_STEP + np.ceil(counts) - self.run.length)

    def result(
        self, name: str, title: str, trials: int, options: Options, groups: list[PerturbedTrials], claims: list[Claim],
        remarks: list[str],
    ) -> Result:  # fmt: skip
        model = self.workload
        start = self.distance(self.run.states[0]["weights"])
        return Result(
            experiment=name,
            config={
                "workload": model.name, "seed": options.seed, "trials": trials, "step": MLR_STEP, "batch": model.batch,
                "learning rate": model.rate, "criterion": model.criterion, "unperturbed": self.run.length,
                "c": self.rate.c, "optimum": f"iterate {BEYOND * self.run.length}",
            },
            rows=[row for group in groups for row in group.rows(self.rate)],
            claims=claims,
            remarks=[*remarks, printed_form_remark(groups, self.rate, start)],
            figures={name: cost_figure(groups, self.rate, f"{title}: {model.name}")},
            captions={name: cost_bound.CAPTION},
        )  # fmt: skip


def reference(options: Options, meter: Meter) -> Reference:
    """Train a model without perturbations until it converges, and return this run with an approximate optimum.

    The state after `BEYOND` times as many iterations stands for the optimum, which is unknown."""
    workload = mlr("digits" if options.quick else "mnist", options.data)
    run = trajectory(workload, progress=meter(f"{workload.name}: unperturbed run", 66))
    far = BEYOND * run.length
    progress = meter(f"{workload.name}: on towards the optimum", far - run.length)
    optimum = continue_training(workload, run.states[-1], run.length, far, progress=progress)["weights"]
    distances = [float(np.linalg.norm(state["weights"] - optimum)) for state in run.states]
    return Reference(workload, run, optimum, worst_rate(distances))


def run_bound(options: Options, meter: Meter) -> Result:
    """Run the experiment mlr-bound: measure the cost of random and of equally large adversarial perturbations."""
    trials = options.trial_count(full=100, quick=50)
    base = reference(options, meter)
    rng = np.random.default_rng(options.seed)
    sizes = base.distance(base.weights) * rng.uniform(0.005, 0.5, size=trials)
    progress = meter(f"{base.workload.name}: perturbed trials", 2 * trials)
    deltas = {
        "random": [gaussian(base.weights.shape, size, rng) for size in sizes],
        "adversarial": [adversarial(base.weights, base.optimum, size) for size in sizes],
    }
    groups = [base.trials(kind, chosen, sizes, options, progress) for kind, chosen in deltas.items()]
    random, worst = (float(np.median(group.closeness(base.rate))) for group in groups)
    length = "iterations of the unperturbed run to the criterion"
    closer = "median cost as a fraction of the bound: adversarial less random"
    claims = [
        Claim("unperturbed", length, "appendix C: roughly 60", (60, 70), base.run.length),
        *(within_claim(group, base.rate, "Theorem 3.2, figure 5", 1) for group in groups),
        Claim("adversarial-closer", closer, "figure 5", (0, None), worst - random),
    ]
    medians = f"{random:.2f} for random, {worst:.2f} for adversarial perturbations"
    remark = f"Median cost as a fraction of the bound: {medians}."
    return base.result("mlr-bound", "Iteration cost of perturbations", trials, options, groups, claims, [remark])


def run_reset(options: Options, meter: Meter) -> Result:
    """Run the experiment mlr-reset: measure the cost of resetting random rows and of equally large perturbations."""
    trials = options.trial_count(full=100, quick=50)
    base = reference(options, meter)
    rng = np.random.default_rng(options.seed)
    blocks, resets = base.workload.blocks, []
    for fraction in rng.uniform(0.01, 1, size=trials):
        after = {"weights": base.weights.copy()}
        blocks.copy(base.run.states[0], after, lost_blocks(len(blocks), fraction, rng))
        resets.append(np.asarray(after["weights"] - base.weights, dtype=np.float64))
    sizes = np.array([np.linalg.norm(delta) for delta in resets])
    deltas = {
        "reset": resets,
        "random": [gaussian(base.weights.shape, size, rng) for size in sizes],
        "adversarial": [adversarial(base.weights, base.optimum, size) for size in sizes],
    }
    progress = meter(f"{base.workload.name}: perturbed trials", 3 * trials)
    groups = [base.trials(kind, chosen, sizes, options, progress) for kind, chosen in deltas.items()]
    mean = {group.kind: float(group.costs.mean()) for group in groups}
    between = (
        "mean cost of a reset on the scale from random (0) to adversarial (1) perturbations of the same size; the paper: "
        "closer to adversarial, though not quite as costly"
    )
    place = (mean["reset"] - mean["random"]) / (mean["adversarial"] - mean["random"])
    claims = [
        within_claim(groups[0], base.rate, "Theorem 3.2, figure 6(a)", 1),
        Claim("between", between, "section 5.2", (0.5, 1), place),
    ]
    means = ", ".join(f"{kind} {cost:.1f}" for kind, cost in mean.items())
    reset, _, worst = (group.costs[int(np.argmax(sizes))] for group in groups)
    remarks = [
        f"Mean cost of perturbations of the same sizes: {means} iterations.",
        f"The largest reset costs {reset:.0f} iterations, an adversarial perturbation of its size {worst:.0f}: resetting "
        f"everything returns to the start, which costs only the {MLR_STEP} iterations done.",
    ]
    return base.result("mlr-reset", "Rows reset to their initial values", trials, options, groups, claims, remarks)


def run_lda(options: Options, meter: Meter) -> Result:
    """Run the experiment lda-reset: reset 10 % to 100 % of the documents halfway through a run, and measure the cost."""
    from holdfast.workloads.lda import lda  # compiled: slow to import

    trials = options.trial_count(full=100, quick=30)
    workload = lda("generated" if options.quick else "newsgroups20", options.data)
    unperturbed = trajectory(workload, progress=meter(f"{workload.name}: unperturbed run", 25))
    step = unperturbed.length // 2
    checkpointed = CheckpointedRun(
        unperturbed.states, workload.blocks, workload.norm, {NEVER}, options.seed, norm_order(workload)
    )
    fractions = [FRACTIONS[i % len(FRACTIONS)] for i in range(trials)]
    strategies = [Strategy(policy=NEVER, recovery="partial", lost=fraction) for fraction in fractions]
    resets = [Trial(strategy, step, number) for number, strategy in enumerate(strategies)]
    # Every reset is compared with an unperturbed run that draws the same random numbers.
    both = [*resets, *(Trial(None, step, trial.number) for trial in resets)]
    limit, progress = 10 * unperturbed.length, per_trial(meter(f"{workload.name}: trials", len(both)))
    counts = iterations_to_criterion(workload, both, checkpointed, limit=limit, jobs=options.jobs, done=progress)
    costs = counts[:trials] - counts[trials:]
    sizes = np.array([checkpointed.perturbation_size(trial) for trial in resets])
    rate = cost_bound.contraction(workload, unperturbed)
    measured = PerturbedTrials("reset", sizes[:, None], np.array([step]), costs)
    correlation = float(np.corrcoef(np.array(fractions, dtype=float), costs)[0, 1])
    words = "correlation of the cost with the fraction of documents reset"
    rises = Claim("rises", words, "figure 6(b)", (0.5, 1), correlation)
    title = f"Documents reset to their initial topics: {workload.name}"
    return Result(
        experiment="lda-reset",
        config={
            "workload": workload.name,
            "seed": options.seed,
            "trials": trials,
            "step": step,
            "criterion": workload.criterion,
            "unperturbed": unperturbed.length,
            "c": rate.c,
            "optimum": f"iterate {round(cost_bound.FAR[-1] * unperturbed.length)}",
        },
        rows=[{**row, "lost": str(lost)} for row, lost in zip(measured.rows(rate), fractions, strict=True)],
        claims=[within_claim(measured, rate, "Theorem 3.2, figure 6(b)", 0.95), rises],
        remarks=[f"Median cost as a fraction of the bound: {np.median(measured.closeness(rate)):.2f}."],
        figures={"lda-reset": cost_figure([measured], rate, title)},
        captions={"lda-reset": cost_bound.CAPTION},
    )


EXPERIMENTS = (
    Experiment(
        name="qp-bound",
        title="iteration costs of random and adversarial perturbations on a 4-D quadratic program",
        source="SCAR, figure 3",
        run=run_qp,
    ),
    Experiment(
        name="mlr-bound",
        title="iteration costs of random and adversarial perturbations of logistic regression on MNIST",
        source="SCAR, figure 5",
        run=run_bound,
    ),
    Experiment(
        name="mlr-reset",
        title="iteration costs of resetting a random fraction of logistic regression's rows, on MNIST",
        source="SCAR, figure 6a",
        run=run_reset,
    ),
    Experiment(
        name="lda-reset",
        title="iteration costs of resetting a random fraction of a topic model's documents, on 20 Newsgroups",
        source="SCAR, figure 6b",
        run=run_lda,
    ),
)
