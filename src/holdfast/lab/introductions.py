"""The beginning of each experiment's report: how the experiment works, and the words that its claims use."""

from collections.abc import Mapping
from dataclasses import dataclass, field

BLOCK = "a part of a model's state, such as a row of a matrix. A block is lost, saved and restored as a whole."
COST = (
    "the number of additional iterations that a run needs, because of a failure, to reach the same loss as without the "
    "failure. A cost can be a fraction of an iteration. It is negative if the run with the failure needs fewer iterations."
)
REDUCTION = (
    "the part of the cost of full recovery that another method avoids. If the reduction is 0.7, the method costs 0.3 of what "
    "full recovery costs."
)
NEVER_SAVED = (
    "a failure before the first full checkpoint. Some or all blocks then have no saved values yet. If such a block has to be "
    "restored, it gets its initial values"
)
EARLY = f"{NEVER_SAVED}. All other failures are late failures."
EARLY_WITH_FULL_CHECKPOINTS = (
    "a failure before the first checkpoint. No block has saved values then, so a block that has to be restored gets its "
    "initial values. All other failures are late failures."
)
POLICY = (
    "`priority` saves the blocks whose values changed most, on average per value, since they were last saved. `round` "
    "saves the blocks that have been unsaved for longest, and `random` saves random blocks. Two policies are not in the SCAR "
    "paper. `relative` saves the blocks whose change is largest when it is divided by the norm of the block's values. "
    "`threshold` takes the blocks that changed more than the mean of all blocks, and saves first the blocks that have been "
    "unsaved for longest."
)
CLASSICAL = (
    "a model with its data. The first part of its name is the model: `mlr` is logistic regression, `mf` matrix factorization "
    "(a product of two matrices, L and R), and `lda` a topic model. The second part is the data set, such as MNIST in "
    "`mlr-mnist`."
)
PANEL = (
    f"{CLASSICAL} The model of `cnn-mnist-layer` and `cnn-mnist-shard` is a convolutional network. A block of "
    "`cnn-mnist-layer` is a whole weight or bias, and a block of `cnn-mnist-shard` is one row of a weight or one element "
    "of a bias."
)
PERTURBATION = (
    "the difference between the recovered state and the state before the failure. Its size is a norm of this difference, such "
    "as the Euclidean norm for `mlr`."
)
BOUND = (
    "an upper limit of the cost, by Theorem 3.2 of the SCAR paper. It depends on the size of the perturbation and on c, the "
    "factor by which each iteration reduces the distance to the optimum."
)
SCAR_PAPER = 'Qiao et al., "Fault Tolerance in Iterative-Convergent Machine Learning" (ICML 2019).'
SCAR = f"{SCAR_PAPER} The sections and figures that claims name are those of this paper."
NICOLAE = 'Nicolae et al., "Towards Low-Overhead Resilience for Data Parallel Deep Learning" (CCGrid 2022).'
NO_CLAIMS = "These are measurements without claims."
CHECKPOINTED = {
    "block": BLOCK,
    "full recovery": "after a failure, all blocks return to their values in the newest checkpoint.",
    "partial recovery": "after a failure, only the lost blocks return to their newest saved values.",
    "cost": COST,
}
BOUNDED = {"perturbation": PERTURBATION, "bound": BOUND, "SCAR paper": SCAR}
SERVER = {
    "block": "a part of the state, such as the topics of one document. A block is lost, saved and restored as a whole.",
    "SCAR paper": SCAR,
    "SCAR (`scar`)": "the method of the SCAR paper: it saves a quarter of the blocks after every iteration, and restores only "
    "the lost blocks after a failure.",
    "full recovery (`traditional`)": "this method saves all blocks after every fourth iteration, and restores all blocks "
    "after a failure.",
    "panel": "a topic model with its data. `lda-20news` has 20 topics, and `lda-20news-200` has 200, on the texts of 20 "
    "Newsgroups.",
}
BACKPROP = {
    "`replay`": "the workers repeat the interrupted mini-batch with all samples.",
    "`forward`": "the surviving workers complete the mini-batch with their own samples.",
    "`skip`": "the mini-batch is dropped, and the weights stay as they were before it.",
    "Baseline": "the same mini-batch without a failure.",
    "panel": "a network with its data. The settings at the end name the panels of this report. `resnet50-tinyimagenet` is a "
    "ResNet-50 on Tiny ImageNet, `nt3` is the network of the NT3 benchmark, which classifies tissue by its gene expression, "
    "and `resnet18-cifar10` is a ResNet-18 on CIFAR-10.",
    "checkpoint-restart": "the usual recovery: all workers return to the newest checkpoint. A checkpoint is made once in "
    "every epoch, so the workers repeat half an epoch on average after a failure.",
    "point of failure": "how much of the backward pass is done when the workers are lost: 25, 50 or 75 %. Each point is "
    "tested early, in the middle and late in training.",
    "performance model": "the model of the paper below (section IV.C), which predicts the cost of a failure from the times of a "
    "mini-batch, a save, a load, and the start of a process.",
    "change of accuracy": "the test accuracy after the interrupted mini-batch minus Baseline's accuracy, divided by Baseline's "
    "accuracy: -0.05 means that the accuracy is lower by 5 % of Baseline's accuracy.",
    "difference of accuracy": "the change of accuracy without its sign.",
    "the paper": f"{NICOLAE} The figures, tables and sections that claims name are those of this paper.",
}
SHARDED = {
    "undisturbed run": "the same run without a failure.",
    "lag": "the number of steps by which a run is behind the undisturbed run at the same loss. This is the cost of a failure. A "
    "negative lag means that the run is ahead.",
    "rollback": "all ranks return to the newest snapshot. This costs as many steps as the snapshot is old. The claims below "
    "divide the mean lag of a strategy by this cost: 0.15 means 15 % of the cost of a rollback.",
    "`whole`": "the lost ranks take their shards from the newest snapshot, as in the SCAR paper (Qiao et al., ICML 2019).",
    "`fresh`, `fresh-averaged`, `fresh-zeroed`": "the lost ranks take the gathered weights: the copies that all ranks had "
    "received for the last forward pass. The moments of AdamW are lost with the ranks. `fresh` takes the moments from "
    "the newest snapshot. `fresh-averaged` sets the first moments to 0, and each lost row of the second moments to the mean "
    "of the rows of the same parameter on the surviving ranks. `fresh-zeroed` sets all lost moments to 0.",
    "`zero-weights`": "the lost weights become 0. The moments are those of `fresh-averaged`.",
    "`neighbours`": "the lost weights and moments become the mean of the rows of the nearest surviving ranks (an idea of "
    "the CheckFree paper, Blagoev et al., 2025).",
    "`shadow`": "the lost ranks take their shards from copies on other ranks. The rank that keeps a copy makes the same "
    "optimizer steps on it as the owner makes on the shard.",
    "noise floor": "the lag (root mean square) of runs in which nothing is lost, but all weights are rounded to bfloat16 once. "
    "A smaller lag can be chance.",
}
MATRIX = {
    "variant": "a recovery method with a way to save. `reference` has no failures. `blocking` and `overlapped` restart all "
    "workers after a failure. `replay`, `forward` and `skip` are live recovery: the surviving workers continue without a "
    "restart. `replay` completes the interrupted step with all samples, `forward` completes it without the samples of the "
    "lost worker, and `skip` drops it.",
    "blocking and overlapped saves": "during a blocking save, training waits until the save is written; during an overlapped "
    "save, training continues meanwhile. `reference` and `blocking` use blocking saves, and all other variants use "
    "overlapped saves.",
    "suite": "a data set, a model and a failure schedule. All variants train every suite with the same seeds.",
    "failure schedule": "the planned failures of a run; the settings at the end list them. `kill of rank 1 at "
    "8:backward=0.5` means that rank 1 is killed in step 8, when half of the backward pass is done.",
    "goodput": "the number of useful steps per second of wall clock. Steps that are trained again do not count.",
    "stall": "the time for which training waits for saves.",
    "audit and quality gates": "checks that every run must pass. The audit checks the run's log of events, for example that "
    "no sample was trained twice. The gates check, for example, that exactly the planned failures happened.",
    "`batch`, `save_every`, `max_inflight`": "settings of a run. `batch` is the number of samples of a step over all workers, "
    "`save_every` the number of steps between two saves, and `max_inflight` the number of saves that may be written at the "
    "same time.",
    "ECRL report": "a report that compares blocking and overlapped saves in runs with failures. `recovery-matrix` repeats "
    "its experiment. Table and section numbers in parentheses, such as (table 5) or (section 6.1), are those of this report.",
}
ADVICE = {
    "case": "one measured cost of one failure, in seconds or in iterations, with the interval that was predicted for it.",
    "workload": "`small` and `wide` train a network of width 128 or 768 on three real workers, one of which is killed. All "
    "other workloads are small models of the lab, whose failures are simulated: logistic regression (`mlr`), matrix "
    "factorization (`mf`), a topic model (`lda`) and a convolutional network (`cnn`).",
    "strategy of real workers": "`restart` starts all workers again from the newest snapshot. Under `replay`, `forward` and "
    "`skip`, the surviving workers continue without a restart.",
    "strategy of a simulation": "a failure loses 1/4 or 1/2 of the state. With `full`, the whole state returns to the newest "
    "save; with `partial`, only the lost part does. `priority` is a variant of `partial`: each save takes the parts of the "
    "state that changed most since they were last saved.",
    "goodput": "the number of useful steps per second. Steps that are trained again do not count.",
    "resampled costs": "values that are drawn at random from the costs of saves and restarts measured in real runs. The "
    "goodput of a run with failures is computed from these values.",
    "effective time": "the share of the wall clock in which a job trains.",
}


@dataclass(frozen=True, slots=True)
class Introduction:
    """The text that says what an experiment does, and the words that its report uses, each with its meaning."""

    text: str
    terms: Mapping[str, str] = field(default_factory=dict)
    about_claims: str = ""


PERTURBED = Introduction(
    "This experiment changes the state of a model during training, and then trains until the model has converged.",
    {
        "perturbation": "the change of the state. Its size is a norm of the difference between the two states.",
        "cost": "the number of additional iterations that training needs because of the perturbation.",
        "bound": BOUND,
        "SCAR paper": SCAR,
    },
)
INTRODUCTIONS = {
    **dict.fromkeys(("qp-bound", "mlr-bound", "mlr-reset", "lda-reset"), PERTURBED),
    "partial-recovery": Introduction(
        "Simulated failures take 1/4, 1/2, 3/4 or all blocks of a model's state. The experiment compares the cost of such "
        "failures under full and under partial recovery. Both use the same checkpoints, which have all blocks.",
        {
            **CHECKPOINTED,
            "reduction": REDUCTION,
            "early failure": EARLY_WITH_FULL_CHECKPOINTS,
            "panel": PANEL,
            **BOUNDED,
        },
    ),
    "comparison": Introduction(
        "Simulated failures take a part of the blocks of your model's state. The report compares their costs under several "
        "policies, which choose the blocks of each checkpoint, and under full and partial recovery. All policies write the "
        "same number of values per iteration.",
        {**CHECKPOINTED, "policy": POLICY, "reduction": REDUCTION, "early failure": EARLY, **BOUNDED},
    ),
    "priority-checkpoint": Introduction(
        "Simulated failures take half of the blocks of a model's state. The experiment compares policies, which choose the "
        "blocks of each checkpoint. Full checkpoints have all blocks; the settings at the end say how often they are made. "
        "Partial checkpoints have a part of the state and are made more often. All policies write the same number of values "
        "per iteration.",
        {
            **CHECKPOINTED,
            "frequency": "at 1x, checkpoints are full. At 8x, they have an eighth of the state and are made eight times as "
            "often.",
            "policy": POLICY,
            "reduction": REDUCTION,
            "early failure": EARLY,
            "panel": PANEL,
            **BOUNDED,
        },
    ),
    "early-failures": Introduction(
        "Simulated failures take half of the blocks (parts) of a model's state. Some failures come before the first full "
        "checkpoint (early failures), and others after it (late failures). The experiment compares several ways to save and to "
        "restore blocks. The list below explains these ways.",
        {
            "block": BLOCK,
            "cost": COST,
            "early failure": f"{NEVER_SAVED}, or values by a rule of the model.",
            "panel": CLASSICAL,
            "SCAR paper": SCAR_PAPER,
        },
        about_claims="The claims are about early failures only.",
    ),
    "backprop-tradeoff": Introduction(
        "Simulated workers are lost in the middle of a backward pass. The strategy `replay`, `forward` or `skip` decides "
        "what happens to the interrupted mini-batch. The experiment measures the time of this mini-batch, the test accuracy "
        "directly after it, and the test accuracy one epoch later.",
        BACKPROP,
    ),
    "server-overhead": Introduction(
        "A topic model trains on a parameter server, half of whose nodes are killed. The experiment measures how many "
        "iterations a run is behind a run without a failure, and how long training waits for checkpoints.",
        SERVER,
    ),
    "advice-check": Introduction(
        "The command `holdfast advise` predicts the cost of failures from runs without a failure. This experiment then "
        "injects failures, measures their cost, and compares it with the prediction. It also compares the goodput (useful "
        "steps per second) at the save interval that the command recommends with the goodput at other intervals.",
        ADVICE,
    ),
    "recovery-matrix": Introduction(
        "Real workers train several models and are killed at planned points. The experiment compares several variants of "
        "recovery, all with the same failures.",
        MATRIX,
    ),
    "sharded-tradeoff": Introduction(
        "A sharded GPT is trained with AdamW on eight simulated ranks. The shard of a rank has some rows of every parameter, "
        "with their moments. Some of the ranks are lost with their shards, and each strategy restores these shards in its own "
        "way. Then training continues on the same batches as in a run without a failure.",
        SHARDED,
    ),
}


def introduction(experiment: str, *, has_claims: bool = True) -> Introduction:
    """Return what the experiment called `experiment` does and measures; empty if there is no such text.

    Without claims, as for the user's own model, there are no words on claims and on the models of the panels."""
    about = INTRODUCTIONS.get(experiment, Introduction(""))
    if has_claims:
        return Introduction(f"{about.text} {about.about_claims}".strip(), about.terms)
    terms = {name: SCAR_PAPER if text == SCAR else text for name, text in about.terms.items() if name != "panel"}
    return Introduction(f"{about.text} {NO_CLAIMS}".strip(), terms)
