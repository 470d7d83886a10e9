"""Figure 9: a topic model on the parameter server, half of whose nodes are killed; what recovery saves, what saving costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from holdfast.blocks.division import Floats
from holdfast.errors import BadInput
from holdfast.lab import confidence as interval
from holdfast.lab.confidence import ConfidenceInterval
from holdfast.lab.experiment import Experiment, Meter, Options
from holdfast.lab.plot_style import COLOURS, legend, new_figure
from holdfast.lab.result import Claim, Result, Row
from holdfast.lab.server.server_trials import (
    ARMS,
    FAILS,
    FULL,
    FULL_ALONE,
    INTERVAL,
    NODES,
    SCAR,
    SCAR_ALONE,
    SELDOM,
    SIDE_BY_SIDE,
    WORKERS,
    Arm,
    ServerTrial,
    message_seconds,
    run_trials,
)
from holdfast.lab.simulate.trajectory import crossing
from holdfast.report.files import prepare

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from holdfast.lab.server.projection import Projection, Rates
    from holdfast.workloads.lda import LatentDirichletAllocation

SOONER, PAPER_SHARE, GOAL = 2.0, 0.054, 0.02
PAPER_TOPICS, PAPER_SECONDS = 1000, 243.0


class OverheadPanel(NamedTuple):
    """A topic model, for how many iterations it is trained, and with how many seeds."""

    workload: str
    iterations: int
    seeds: int


# The paper has 1,000 topics, which make its iterations long. Beside the 20 topics of all our panels a model with 200
# shows what the length of an iteration does to the part of it that a checkpoint takes. Runs with 20 topics differ more
# from seed to seed: 8 of them did not decide how much sooner SCAR is.
PANELS = (OverheadPanel("lda-20news", 17, 16), OverheadPanel("lda-20news-200", 17, 3))
REDUCED = (OverheadPanel("lda-generated", 12, 3),)
DRAWN_IN = {SCAR: COLOURS["priority"], FULL: COLOURS["full recovery"], SCAR_ALONE: COLOURS["partial recovery"]}


@dataclass(frozen=True, slots=True, eq=False)
class OverheadResults:
    """What all trials showed, and what they come to at the size of the paper."""

    workload: str
    topics: int
    trials: Sequence[ServerTrial]
    rates: "Rates"
    projection: "Projection"

    def of(self, arm: Arm) -> list[ServerTrial]:
        """The trials of an arm, by seed."""
        return sorted((trial for trial in self.trials if trial.arm == arm), key=lambda trial: trial.seed)

    def sooner(self, less: Arm, more: Arm) -> ConfidenceInterval:
        """How many iterations sooner one arm is where the other comes to, over the seeds."""
        pairs = zip(self.of(less), self.of(more), strict=True)
        counts = np.array([iterations_sooner(a.losses, b.losses) for a, b in pairs])
        return ConfidenceInterval(-np.inf, np.nan, np.nan) if np.isinf(counts).any() else interval.mean_of_few(counts)

    def share(self) -> ConfidenceInterval:
        """What training waits for checkpoints, in proportion to the rest of an iteration, over the seeds."""
        return interval.mean_of_few(np.array([checkpoint_share(trial) for trial in self.of(SCAR_ALONE)]))

    def added(self) -> ConfidenceInterval:
        """What a save adds to the iterations that it touches, against others of the same processes, over the seeds."""
        return interval.mean_of_few(np.array([time_added(trial) for trial in self.of(SIDE_BY_SIDE)]))


def iterations_sooner(less: Floats, more: Floats, fails: int = FAILS) -> float:
    """How many iterations sooner the first run reaches what the second comes to after its failure, on average.

    Counted for every loss of the second run that neither had reached up to the iteration of the failure and with it; in
    fractions of an iteration.
    """
    best = min(less[:fails].min(), more[:fails].min())
    levels = [number for number in range(fails, len(more)) if more[number] < best]
    if not levels:
        return float("nan")
    return float(np.mean([number - iteration_reached(less, more[number], fails) for number in levels]))


def iteration_reached(losses: Floats, level: float, fails: int) -> float:
    """The iteration after the failure, in fractions and counted from 0, at which the loss is at a level."""
    for number in range(fails, len(losses)):
        if losses[number] <= level:
            return number - 1 + crossing(float(losses[number - 1]), float(losses[number]), level)
    return float("inf")


def checkpoint_share(trial: ServerTrial) -> float:
    """Of the median iteration; the first one is left out, because it compiles."""
    return float(np.median(trial.of["checkpoint"][1:]) / np.median(trial.rest[1:]))


def time_added(trial: ServerTrial) -> float:
    """What saves add to the iteration they end and to the next, in which they are written, over one that has neither."""
    steps = np.arange(1, len(trial.losses) + 1)
    period = int(SELDOM.period)
    seconds = trial.of["seconds"]
    saving, writing = (np.median(seconds[(steps > 1) & (steps % period == after)]) for after in (0, 1))
    clean = np.median(seconds[(steps > 1) & (steps % period > 1)])
    return float((saving + writing - 2 * clean) / clean)


def run(options: Options, meter: Meter) -> Result:
    """Run all arms on the server, then measure rates for the projection."""
    panels = _chosen(options)
    prepare(options.out)
    seeds = {panel.workload: range(options.seed, options.seed + options.count(panel.seeds, 1)) for panel in panels}
    found = [_found(panel, seeds[panel.workload], options, meter) for panel in panels]
    return Result(
        experiment="server-overhead",
        config={
            "workloads": ", ".join(seeds),
            "nodes": NODES,
            "workers": WORKERS,
            "iterations": panels[0].iterations,
            "killed": f"2 of {NODES} nodes in iteration {FAILS}",
            "seeds": "; ".join(", ".join(map(str, each)) for each in seeds.values()),
        },
        rows=[row for each in found for row in rows(each)],
        claims=[claim for each in found for claim in claims(each)],
        remarks=[*(line for each in found for line in remarks(each)), *_lengths(found), *_projection(found[-1])],
        figures={each.workload: figure(each) for each in found},
        captions={each.workload: CAPTION for each in found},
    )


def _chosen(options: Options) -> tuple[OverheadPanel, ...]:
    panels = PANELS if options.data is not None and not options.quick else REDUCED
    names = [panel.workload for panel in panels]
    if unknown := [name for name in options.panels if name not in names]:
        raise BadInput(f"there is no panel {unknown[0]!r}; choose among {', '.join(names)}")
    return tuple(panel for panel in panels if not options.panels or panel.workload in options.panels)


def _found(panel: OverheadPanel, seeds: Sequence[int], options: Options, meter: Meter) -> OverheadResults:
    arms = ARMS if not options.quick else (SCAR, FULL, SCAR_ALONE, SIDE_BY_SIDE)
    trials = run_trials(panel.workload, panel.iterations, arms, seeds, options, meter)
    return _projected(panel.workload, trials, message_seconds(panel.workload, options), options)


def _projected(workload: str, trials: Sequence[ServerTrial], message: float, options: Options) -> OverheadResults:
    from holdfast.lab.server.projection import PAPER, measure_rates, project
    from holdfast.workloads.registry import load_workload

    model = cast("LatentDirichletAllocation", load_workload(workload, options.data))
    alone = [trial for trial in trials if trial.arm == SCAR_ALONE]
    transferred = float(np.median([_transferred(model, trial) for trial in alone]))
    rates = measure_rates(model, options.out, transferred, message)
    return OverheadResults(workload, model.topics, trials, rates, project(rates, PAPER))


def _transferred(model: "LatentDirichletAllocation", trial: ServerTrial) -> float:
    """Bytes a second of a worker: topics of its tokens there and back, and the counts of every node."""
    start = model.start()
    counts = model.summary(np.arange(len(model.blocks)), start)["counts"].nbytes
    moved = 2 * start["topics"].nbytes / WORKERS + NODES * counts
    return float(moved / np.median((trial.of["pull"] + trial.of["push"])[1:]))


def claims(found: OverheadResults) -> list[Claim]:
    """The paper's figure and its 13 of 243 seconds, and our own goal."""
    name, saved, of, beside = found.workload, found.sooner(SCAR, FULL), found.share(), found.added()
    waits = "time that training waits for a checkpoint after every iteration, over the rest of the iteration"
    adds = "time that a save adds to its iteration and the next, over an iteration without one in the same processes"
    paper = "section 5.5: 13 of 243 s"
    return [
        _claim(f"{name}-sooner", f"{name}: iterations that SCAR is sooner where full recovery comes to", "figure 9: about 3",
               (SOONER, None), saved),
        _claim(f"{name}-share", f"{name}: {waits}", paper, (None, PAPER_SHARE), of),
        _claim(f"{name}-goal", f"{name}: {waits}", "our goal", (None, GOAL), of),
        _claim(f"{name}-added", f"{name}: {adds}", paper, (None, PAPER_SHARE), beside),
    ]  # fmt: skip


def _claim(
    ident: str, text: str, source: str, expected: tuple[float | None, float | None], of: ConfidenceInterval
) -> Claim:
    known = None if np.isnan(of.low) else (of.low, of.high)
    return Claim(id=ident, claim=text, source=source, expected=expected, measured=of.value, interval=known)


def remarks(found: OverheadResults) -> list[str]:
    """What a reader should know beside the claims, and the causes of those that fail."""
    return [f"{found.workload}: {line}" for line in (_cost(found), _waiting(found), *_causes(found))]


def _cost(found: OverheadResults) -> str:
    parts = [f"{arm.name} {_words(found.sooner(SCAR_ALONE, arm))}" for arm in (SCAR, FULL)]
    return (
        f"Nodes are killed at the end of iteration {FAILS}, when what workers pushed is about to be applied; the last full "
        f"checkpoint is of iteration {FAILS - FAILS % INTERVAL}, so full recovery loses {FAILS % INTERVAL} iterations, and "
        f"no recovery could save more (had they been killed as it began: {FAILS % INTERVAL - 1}). Iterations behind the run without a failure: {', '.join(parts)}."
    )


def _waiting(found: OverheadResults) -> str:
    seconds, checkpoint = (_median(found.of(SCAR_ALONE), name) for name in ("seconds", "checkpoint"))
    full = _median(found.of(FULL_ALONE), "seconds") if found.of(FULL_ALONE) else float("nan")
    whole = "" if np.isnan(full) else f" and {full:.3g} s where all is saved every {INTERVAL} iterations"
    return (
        f"An iteration takes {seconds:.3g} s (median){whole}; of that training waits {checkpoint:.3g} s for SCAR's "
        f"checkpoint. The paper's takes {PAPER_SECONDS:g} s."
    )


def _causes(found: OverheadResults) -> list[str]:
    """What was checked of claims that fail beyond doubt."""
    failed = {claim.id.rpartition("-")[2] for claim in claims(found) if claim.resolved and not claim.holds}
    lines = []
    if "sooner" in failed:
        behind = _words(found.sooner(SCAR_ALONE, SCAR))
        lines += [f"SCAR is not {SOONER:g} iterations sooner: it is itself {behind} behind the run without a failure."]
    if failed & {"share", "goal", "added"}:
        lines += [_dear(found)]
    return lines


def _dear(found: OverheadResults) -> str:
    """Why a checkpoint takes the share that it takes, as far as it was measured."""
    from holdfast.lab.server.projection import MESSAGES

    alone, rates = found.of(SCAR_ALONE), found.rates
    seconds, checkpoint = _median(alone, "seconds"), _median(alone, "checkpoint")
    messages = MESSAGES * rates.message
    rest = max(checkpoint - rates.work - messages, 0.0)
    text = (
        f"Checkpoints are too dear here. Distances, choice and copies take a node {rates.work:.2g} s when nothing else runs, "
        f"{rates.work / (seconds - checkpoint):.1%} of the rest of an iteration, and {MESSAGES} messages {messages:.2g} s if "
        f"they ask nothing; the other {rest:.2g} s were not measured apart: {NODES + WORKERS + 1} processes share the cores"
    )
    if full := found.of(FULL_ALONE):
        waits = np.concatenate([trial.of["checkpoint"][INTERVAL - 1 :: INTERVAL] for trial in full])
        text += f" (a save of all blocks, which measures no distances, makes training wait {np.median(waits):.2g} s)"
    return f"{text}. The paper's iteration is {PAPER_SECONDS / seconds:.0f} times longer."


def _lengths(panels: Sequence[OverheadResults]) -> list[str]:
    """What the length of an iteration does to the part of it that a checkpoint takes."""
    if len(panels) < 2:
        return []
    each = [
        f"{found.topics} topics: {_median(found.of(SCAR_ALONE), 'checkpoint'):.3g} s for a checkpoint, "
        f"{_median(found.of(SCAR_ALONE), 'seconds'):.3g} s for an iteration with it, a part of {_words(found.share())}"
        for found in panels
    ]
    return [
        f"The paper samples from {PAPER_TOPICS} topics a token, which takes long, and a checkpoint takes no longer for it. "
        f"So there are two panels. {'; '.join(each)}."
    ]


def _projection(found: OverheadResults) -> list[str]:
    from holdfast.lab.server.projection import ASSUMPTIONS

    rates, at = found.rates, found.projection
    return [
        f"PROJECTION, not measured, to 480 K documents, 2 B tokens, 1 K topics, 4 machines: an iteration of "
        f"{at.iteration:.0f} s from the rates of {found.workload} (computing {at.compute:.0f} s, pulling and pushing {at.transfer:.0f} s; the paper's took "
        f"243 s), to which a checkpoint adds {at.checkpoint:.1f} s (the paper's 13 s), {at.share:.1%}; its write takes "
        f"{at.write:.0f} s in the background, {'less' if at.write < at.iteration else 'MORE'} than an iteration.",
        f"Rates it is made of: {rates.sample * 1e9:.2g} ns a token and topic sampled; {rates.transfer / 1e6:.3g} MB/s pulled "
        f"and pushed by a worker; for distances {rates.tally * 1e9:.3g} ns a token; "
        f"{rates.select * 1e6:.2g} µs a document for the selection; {rates.set_aside / 1e6:.3g} MB/s set "
        f"aside; {rates.write / 1e6:.3g} MB/s written; {rates.message:.2g} s a message.",
        f"It assumes: {'; '.join(ASSUMPTIONS)}.",
    ]


def rows(found: OverheadResults) -> list[Row]:
    """Every iteration of every trial, then the rates and the projection."""
    each = [
        {
            "what": "iteration",
            "workload": found.workload,
            "arm": trial.arm.name,
            "seed": trial.seed,
            "iteration": number + 1,
            **_numbers(trial, number),
        }
        for trial in found.trials
        for number in range(len(trial.losses))
    ]
    rates: Mapping[str, float] = {name: getattr(found.rates, name) for name in found.rates.__dataclass_fields__}
    at = found.projection
    projected = {"compute_s": at.compute, "transfer_s": at.transfer, "checkpoint_s": at.checkpoint, "write_s": at.write}
    which = {"workload": found.workload}
    return [*each, {"what": "rates", **which, **rates}, {"what": "projection", **which, **projected}]


def _numbers(trial: ServerTrial, number: int) -> Row:
    return {name if name == "loss" else f"{name}_s": float(values[number]) for name, values in trial.of.items()}


def figure(found: OverheadResults) -> "Figure":
    """Likelihood against iteration and against time: all seeds thin, their mean thick."""
    drawn = new_figure(9, 3.8)
    for axes, timed in zip(drawn.subplots(1, 2), (False, True), strict=True):
        for arm, colour in DRAWN_IN.items():
            _curves(axes, found.of(arm), colour, timed)
        axes.set_xlabel(
            "seconds since the first iteration" if timed else f"iteration (dotted: failure in the {FAILS}th)"
        )
        axes.set_ylabel("log likelihood")
    drawn.axes[0].axvline(FAILS, color="black", linestyle=":")
    legend(drawn, drawn.axes[:1])
    drawn.suptitle(f"{found.workload}, 2 of {NODES} nodes killed")
    return drawn


CAPTION = "Likelihood over iterations and over seconds: every seed thin, their mean thick. Nodes are killed at the dotted line."


def _curves(axes: "Axes", trials: Sequence[ServerTrial], colour: str, timed: bool) -> None:
    length = min(len(trial.losses) for trial in trials)
    places = [_places(trial, timed)[:length] for trial in trials]
    for place, trial in zip(places, trials, strict=True):
        axes.plot(place, -trial.losses[:length], color=colour, alpha=0.3, linewidth=0.8)
    likelihood = -np.mean([trial.losses[:length] for trial in trials], axis=0)
    axes.plot(np.mean(places, axis=0), likelihood, color=colour, marker="o", markersize=3, label=trials[0].arm.name)


def _places(trial: ServerTrial, timed: bool) -> Floats:
    if timed:
        return np.append(0.0, np.cumsum(trial.of["seconds"][1:]))
    return np.arange(1.0, len(trial.losses) + 1)


def _median(trials: Sequence[ServerTrial], name: str) -> float:
    """Over all iterations but the first, which compiles."""
    return float(np.median(np.concatenate([trial.of[name][1:] for trial in trials])))


def _words(of: ConfidenceInterval) -> str:
    if not np.isfinite(of.value):
        return "cannot be counted (a run ends lower than the other ever came)"
    return f"{of.value:.2f}" if np.isnan(of.low) else f"{of.value:.2f} ({of.low:.2f} to {of.high:.2f})"


EXPERIMENT = Experiment(
    name="server-overhead",
    title="a topic model on the parameter server, half of whose nodes are killed: what SCAR saves and what it costs",
    source="SCAR, figure 9",
    run=run,
    panels=True,
)
