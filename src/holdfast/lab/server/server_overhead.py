"""Figure 9 of the SCAR paper: kill half of a parameter server's nodes, and measure recovery and checkpoint costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from holdfast.blocks.division import Floats
from holdfast.lab.confidence import ConfidenceInterval, mean
from holdfast.lab.experiment import Experiment, Meter, Options, chosen
from holdfast.lab.plot_style import COLOURS, legend, new_figure
from holdfast.lab.result import Claim, Result, Row
from holdfast.lab.server import server_trials
from holdfast.lab.server.server_trials import FAILS, FULL, FULL_ALONE, INTERVAL, NODES, SCAR, SCAR_ALONE, ServerTrial
from holdfast.lab.simulate.lanes import crossing
from holdfast.report.files import prepare

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOONER, PAPER_SHARE, GOAL = 2.0, 0.054, 0.02
PAPER_TOPICS, PAPER_SECONDS = 1000, 243.0


class OverheadPanel(NamedTuple):
    """A topic model to train, with the number of iterations and of random seeds."""

    workload: str
    topics: int
    iterations: int
    seeds: int


# The paper has 1,000 topics, which make its iterations long. Besides the 20 topics of all our panels, a model with 200
# shows how the length of an iteration changes the share of a checkpoint. Runs with 20 topics differ more from seed to
# seed: 8 of them did not decide how much sooner SCAR is.
PANELS = (OverheadPanel("lda-20news", 20, 17, 16), OverheadPanel("lda-20news-200", 200, 17, 3))
REDUCED = (OverheadPanel("lda-generated", 20, 12, 3),)
DRAWN_IN = {SCAR: COLOURS["priority"], FULL: COLOURS["full recovery"], SCAR_ALONE: COLOURS["partial recovery"]}
CAPTION = (
    "log likelihood of the model by iteration (left) and by seconds of training (right). Each seed has a thin line, and their "
    "mean has a thick line. Nodes are killed at the dotted line."
)


@dataclass(frozen=True, slots=True, eq=False)
class OverheadResults:
    """The training runs of one topic model on the parameter server."""

    workload: str
    topics: int
    trials: Sequence[ServerTrial]

    def of(self, arm: server_trials.ExperimentArm) -> list[ServerTrial]:
        return sorted((trial for trial in self.trials if trial.arm == arm), key=lambda trial: trial.seed)

    def sooner(self, less: server_trials.ExperimentArm, more: server_trials.ExperimentArm) -> ConfidenceInterval:
        """Return how many iterations earlier runs of `less` reach the losses of runs of `more`: the mean over seeds."""
        pairs = zip(self.of(less), self.of(more), strict=True)
        counts = np.array([iterations_sooner(a.losses, b.losses) for a, b in pairs])
        return ConfidenceInterval(-np.inf, np.nan, np.nan) if np.isinf(counts).any() else mean(counts)

    def share(self) -> ConfidenceInterval:
        """Return the time that training waits for checkpoints, divided by all other time, as a mean over the seeds."""
        return mean(np.array([checkpoint_share(trial) for trial in self.of(SCAR_ALONE)]))

    def added(self) -> ConfidenceInterval:
        """Return the time that a save adds to training, divided by the time of an iteration: the mean over the seeds."""
        return mean(np.array([time_added(trial) for trial in self.of(server_trials.SIDE_BY_SIDE)]))


def iterations_sooner(less: Floats, more: Floats, fails: int = FAILS) -> float:
    """Return how many iterations earlier, on average, a run with losses `less` reaches the losses `more` of another.

    Nodes fail in iteration `fails`. Only the losses of `more` after this failure count, and only if they are lower
    than all losses of both runs before it. The result is NaN if no loss counts."""
    best, counts = min(less[:fails].min(), more[:fails].min()), []
    for number, level in enumerate(more.tolist()):
        if number >= fails and level < best:
            at = next((at for at in range(fails, len(less)) if less[at] <= level), None)
            reached = np.inf if at is None else at - 1 + crossing(float(less[at - 1]), float(less[at]), level)
            counts.append(number - reached)
    return float(np.mean(counts)) if counts else float("nan")


def checkpoint_share(trial: ServerTrial) -> float:
    """Return the median checkpoint time of an iteration, divided by the median of all other time of an iteration."""
    checkpoint, seconds = (trial.columns[name][1:] for name in ("checkpoint", "seconds"))
    return float(np.median(checkpoint) / np.median(seconds - checkpoint))


def time_added(trial: ServerTrial) -> float:
    """Return the time that a save adds to training, divided by the time of an iteration without a save."""
    seconds, period = trial.columns["seconds"], int(server_trials.SELDOM.period)
    steps = np.arange(1, len(seconds) + 1)
    saving, writing = (np.median(seconds[(steps > 1) & (steps % period == after)]) for after in (0, 1))
    clean = np.median(seconds[(steps > 1) & (steps % period > 1)])
    return float((saving + writing - 2 * clean) / clean)


def run(options: Options, meter: Meter) -> Result:
    """Run the experiment: train topic models on the parameter server, with every checkpoint policy and recovery."""
    known = PANELS if options.data is not None and not options.quick else REDUCED
    panels = chosen(options.panels, {panel.workload: panel for panel in known}, "panel")
    prepare(options.out)
    seeds = {p.workload: range(options.seed, options.seed + options.trial_count(p.seeds, 1)) for p in panels}
    arms = [arm for arm in server_trials.ARMS if not (options.quick and arm == FULL_ALONE)]
    all_results = []
    for name, topics, iterations, _ in panels:
        trials = server_trials.run_trials(name, iterations, arms, seeds[name], options, meter)
        all_results.append(OverheadResults(name, topics, trials))
    return Result(
        experiment="server-overhead",
        config={
            "panels": ", ".join(seeds),
            "nodes": NODES,
            "workers": server_trials.WORKERS,
            "iterations": panels[0].iterations,
            "killed": f"2 of {NODES} nodes in iteration {FAILS}",
            "seeds": "; ".join(", ".join(map(str, own)) for own in seeds.values()),
        },
        rows=[row for results in all_results for row in rows(results)],
        claims=[claim for results in all_results for claim in claims(results)],
        remarks=[
            *(line for results in all_results for line in remarks(results)),
            *_lengths(all_results),
        ],
        figures={results.workload: figure(results) for results in all_results},
        captions={results.workload: f"{results.workload}: {CAPTION}" for results in all_results},
    )


def claims(results: OverheadResults) -> list[Claim]:
    """Return claims about a topic model: how much earlier SCAR reaches a loss, and what its checkpoints cost.

    SCAR saves and restores only a part of the model at a time."""
    name, share = results.workload, results.share()
    sooner = f"{name}: iterations by which SCAR reaches the same loss sooner than full recovery, after the failure"
    waits = f"{name}: time for which training waits for the checkpoint of an iteration, divided by the rest of the iteration"
    adds = (
        f"{name}: time that a save adds to its iteration and the next one, divided by the time of an iteration without a "
        f"save, in runs that save a quarter of the blocks after every {INTERVAL}th iteration"
    )
    paper = "section 5.5: 13 of 243 s"
    return [
        Claim.of_estimate(f"{name}-sooner", sooner, "figure 9: about 3", (SOONER, None), results.sooner(SCAR, FULL)),
        Claim.of_estimate(f"{name}-share", waits, paper, (None, PAPER_SHARE), share),
        Claim.of_estimate(f"{name}-goal", waits, "our goal", (None, GOAL), share),
        Claim.of_estimate(f"{name}-added", adds, paper, (None, PAPER_SHARE), results.added()),
    ]


def remarks(results: OverheadResults) -> list[str]:
    """Return sentences for the report on one topic model: the delay by failures, and the time of a checkpoint."""
    parts = [f"`{arm.name}` {_words(results.sooner(SCAR_ALONE, arm))}" for arm in (SCAR, FULL)]
    seconds, checkpoint = (_median(results.of(SCAR_ALONE), name) for name in ("seconds", "checkpoint"))
    full = _median(results.of(FULL_ALONE), "seconds") if results.of(FULL_ALONE) else float("nan")
    whole = (
        ""
        if np.isnan(full)
        else f" With full checkpoints every {INTERVAL} iterations, an iteration takes {full:.3g} s."
    )
    lines = [
        f"nodes are killed at the end of iteration {FAILS}, before the updates of the workers are applied. The newest full "
        f"checkpoint is of iteration {FAILS - FAILS % INTERVAL}, so full recovery loses {FAILS % INTERVAL} iterations, and "
        f"SCAR can reach the same loss at most {FAILS % INTERVAL} iterations sooner than full recovery.",
        f"iterations by which a run is behind the run without a failure: {', '.join(parts)}.",
        f"with SCAR, an iteration takes {seconds:.3g} s (median), and training waits {checkpoint:.3g} s of this time for the "
        f"checkpoint.{whole} In the SCAR paper, an iteration takes {PAPER_SECONDS:g} s.",
    ]
    failed = {claim.id.rpartition("-")[2] for claim in claims(results) if claim.resolved and not claim.holds}
    if "sooner" in failed:
        behind = _words(results.sooner(SCAR_ALONE, SCAR))
        lines.append(
            f"SCAR is less than {SOONER:g} iterations sooner, because it is itself {behind} iterations behind the run without "
            "a failure."
        )
    if failed & {"share", "goal", "added"}:
        lines.append(_checkpoint_cost(results))
    return [f"{results.workload}: {line}" for line in lines]


def _checkpoint_cost(results: OverheadResults) -> str:
    """Return a sentence that says why a checkpoint takes long compared with an iteration."""
    count = NODES + server_trials.WORKERS + 1
    text = f"checkpoints take longer than the claims allow. On this machine, {count} processes share the cores"
    if full := results.of(FULL_ALONE):
        waits = np.concatenate([trial.columns["checkpoint"][INTERVAL - 1 :: INTERVAL] for trial in full])
        text += f" (training waits {np.median(waits):.2g} s for a save of all blocks, which does not compute changes)"
    seconds = _median(results.of(SCAR_ALONE), "seconds")
    return f"{text}. An iteration of the SCAR paper is {PAPER_SECONDS / seconds:.0f} times longer than here."


def _lengths(panels: Sequence[OverheadResults]) -> list[str]:
    if len(panels) < 2:
        return []
    parts = [
        f"with {results.topics} topics, training waits {_median(results.of(SCAR_ALONE), 'checkpoint'):.3g} s for a checkpoint "
        f"in an iteration of {_median(results.of(SCAR_ALONE), 'seconds'):.3g} s"
        for results in panels
    ]
    return [
        f"The SCAR paper uses {PAPER_TOPICS:,} topics. More topics make an iteration longer, but not a checkpoint. So the "
        f"experiment is run with two numbers of topics: {'; '.join(parts)}."
    ]


def rows(results: OverheadResults) -> list[Row]:
    """Return one row for each iteration of each trial."""
    return [
        {
            "what": "iteration",
            "workload": results.workload,
            "arm": trial.arm.name,
            "seed": trial.seed,
            "iteration": number + 1,
            **{
                name if name == "loss" else f"{name}_s": float(column[number]) for name, column in trial.columns.items()
            },
        }
        for trial in results.trials
        for number in range(len(trial.losses))
    ]


def figure(results: OverheadResults) -> "Figure":
    """Plot the likelihood over iterations and over time: a thin line for each seed, a thick line for their mean."""
    drawn = new_figure(9, 3.8)
    by_iteration, by_time = drawn.subplots(1, 2)
    for axes in (by_iteration, by_time):
        for arm, colour in DRAWN_IN.items():
            trials = results.of(arm)
            length = min(len(trial.losses) for trial in trials)
            places = [np.arange(1.0, length + 1)] * len(trials)
            if axes is by_time:
                places = [np.append(0.0, np.cumsum(trial.columns["seconds"][1:length])) for trial in trials]
            for place, trial in zip(places, trials, strict=True):
                axes.plot(place, -trial.losses[:length], color=colour, alpha=0.3, linewidth=0.8)
            mean = -np.mean([trial.losses[:length] for trial in trials], axis=0)
            axes.plot(np.mean(places, axis=0), mean, color=colour, marker="o", markersize=3, label=arm.name)
        axes.set_ylabel("log likelihood")
    by_iteration.set_xlabel(f"iteration (dotted: failure in the {FAILS}th)")
    by_time.set_xlabel("seconds since the first iteration")
    by_iteration.axvline(FAILS, color="black", linestyle=":")
    legend(drawn, [by_iteration])
    drawn.suptitle(f"{results.workload}, 2 of {NODES} nodes killed")
    return drawn


def _median(trials: Sequence[ServerTrial], name: str) -> float:
    """Return the median of the column `name` over all iterations; the first iteration of each trial is left out."""
    return float(np.median(np.concatenate([trial.columns[name][1:] for trial in trials])))


def _words(estimate: ConfidenceInterval) -> str:
    if not np.isfinite(estimate.value):
        return "unknown (one run never reaches the losses of the other)"
    return f"{estimate.value:.2f} ({estimate.ends()})"


EXPERIMENT = Experiment(
    name="server-overhead",
    title="a topic model on the parameter server, half of whose nodes are killed: what SCAR saves and what it costs",
    source="SCAR, figure 9",
    has_panels=True,
    run=run,
)
