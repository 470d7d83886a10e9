"""Figure 6b of the SCAR paper: the cost of resetting random documents of a topic model to their initial topics."""

from fractions import Fraction

import numpy as np

from holdfast.blocks.policy import Policy
from holdfast.lab.bounds.contraction import FAR, contraction
from holdfast.lab.bounds.perturbed_trials import CAPTION, PerturbedTrials, cost_figure, within_claim
from holdfast.lab.experiment import Experiment, Meter, Options, per_trial
from holdfast.lab.result import Claim, Result
from holdfast.lab.simulate.lanes import iterations_to_criterion
from holdfast.lab.simulate.strategy import CheckpointedRun, Strategy, Trial
from holdfast.lab.simulate.trajectory import trajectory
from holdfast.workloads.workload import norm_order

FRACTIONS = tuple(Fraction(n, 10) for n in range(1, 11))
NEVER = Policy(ranking="full", interval=10**9)  # saves nothing, so lost blocks return to the start


def run(options: Options, meter: Meter) -> Result:
    """Run the experiment: halfway through a run, reset 10 % to 100 % of the documents, and measure the cost."""
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
    rate = contraction(workload, unperturbed)
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
            "optimum": f"iterate {round(FAR[-1] * unperturbed.length)}",
        },
        rows=[{**row, "lost": str(lost)} for row, lost in zip(measured.rows(rate), fractions, strict=True)],
        claims=[within_claim(measured, rate, "Theorem 3.2, figure 6(b)", 0.95), rises],
        remarks=[f"Median cost as a fraction of the bound: {np.median(measured.closeness(rate)):.2f}."],
        figures={"lda-reset": cost_figure([measured], rate, title)},
        captions={"lda-reset": CAPTION},
    )


EXPERIMENT = Experiment(
    name="lda-reset",
    title="iteration costs of resetting a random fraction of a topic model's documents, on 20 Newsgroups",
    source="SCAR, figure 6b",
    run=run,
)
