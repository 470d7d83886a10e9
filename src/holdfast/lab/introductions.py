"""The first sentences of each experiment's report: how it works, and the words that its claims use."""

COST = (
    "The cost of a failure is the number of iterations by which the run reaches the same loss later than the same run "
    "without a failure. A negative cost means that it is sooner."
)
PANEL = "A panel is a model with its data, such as `mlr-mnist` (logistic regression on MNIST)."
BOUND = (
    "The bound is an upper limit of the cost by Theorem 3.2 of the SCAR paper. It depends on the size of the perturbation "
    "(how far the changed state is from the state before) and on c, the factor by which each iteration reduces the distance "
    "to the optimum."
)
PERTURBED = (
    f"A model is perturbed in training, and continues until it has converged. The cost of the perturbation is the number of "
    f"additional iterations that this takes. {BOUND}"
)
INTRODUCTIONS = {
    **dict.fromkeys(("qp-bound", "mlr-bound", "mlr-reset", "lda-reset"), PERTURBED),
    "partial-recovery": (
        "A simulated failure takes 1/4, 1/2, 3/4 or all blocks (parts) of a model's state. With partial recovery, only the "
        f"lost blocks return to the newest checkpoint; with full recovery, all blocks return to it. {COST} A reduction of 0.7 "
        "means that partial recovery costs 0.3 of what full recovery costs. An early failure is one before the first full "
        f"checkpoint: blocks then return to their initial values. {PANEL} {BOUND}"
    ),
    "priority-checkpoint": (
        "A simulated failure takes half of the blocks (parts) of a model's state. All policies write the same number of "
        "values, but save other blocks first. At 1x, a checkpoint has all blocks; at 8x, checkpoints have an eighth of the "
        f"state and are made eight times as often. {COST} A reduction of 0.7 means 0.3 of the cost of full recovery, in which "
        "checkpoints have all blocks and all blocks return to the newest one. An early failure is one before the first full "
        f"checkpoint: blocks then return to their initial values. {PANEL} {BOUND}"
    ),
    "early-failures": (
        "A simulated failure takes half of the blocks (parts) of a model's state, either before the first full checkpoint (an "
        f"early failure) or after it. Eight ways to save and to restore blocks are compared. {COST} {PANEL}"
    ),
    "backprop-tradeoff": (
        "Simulated workers are lost in the middle of a backward pass, and the mini-batch is finished in one of three ways: "
        "`replay` repeats it with all samples, `forward` completes it with the samples of the surviving workers, and `skip` "
        "drops it. Measured are the time of this mini-batch, and the test accuracy directly after it and an epoch later. Both "
        "are compared with Baseline, the same mini-batch without a failure. Checkpoint-restart is the usual recovery: all "
        "workers return to a checkpoint that is made once in an epoch."
    ),
    "server-overhead": (
        "A topic model trains on a parameter server, half of whose nodes are killed. `scar` is the method of the SCAR paper: "
        "it saves a quarter of the blocks (parts of the state) after every iteration, and restores only the lost blocks. `traditional` is full recovery: it "
        "saves all blocks after every fourth iteration, and restores all of them. Measured are the iterations by which one "
        "run reaches the same loss later than another, and the time that checkpoints take."
    ),
    "advice-check": (
        "`holdfast advise` predicts the cost of failures from runs without a failure. Then failures are injected, and their "
        "cost is measured. Goodput is the number of useful steps per second. Effective time is the share of the wall clock in "
        "which a job trains."
    ),
    "recovery-matrix": (
        "Real workers train and are killed at the same points in several variants: a variant is a recovery method with a way "
        "to save (`blocking`: training waits for the write; `overlapped`: it continues). A suite is a data set, a model and a "
        "failure schedule; all variants train it with the same seeds. The reference is the run without failures. Goodput is "
        "the number of useful steps per second of wall clock. Stall is the time that training waits for saves. Tables and "
        "sections in parentheses are those of the ECRL report."
    ),
    "sharded-tradeoff": (
        "Some of the eight simulated ranks of a sharded GPT are lost with their shards, and each strategy restores these "
        "shards in its own way (the table of lags describes each). Then training continues on the same batches. The cost of a failure is its lag: the number of "
        "steps by which the run is behind the undisturbed run (the same run without a failure) at the same loss. A negative "
        "lag means that the run is ahead. Claims divide the mean lag by the cost of a rollback, in which all ranks return to "
        "the newest snapshot: 0.15 means 15 % of that cost. The moments are those of the optimizer AdamW. Gathered weights "
        "are those that all ranks had received for the last forward pass."
    ),
}


def introduction(experiment: str) -> str:
    """Return what the experiment called `experiment` does and measures; empty if there is no such text."""
    return INTRODUCTIONS.get(experiment, "")
