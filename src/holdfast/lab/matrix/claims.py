"""Claims about the runs of a recovery matrix, and remarks for readers. Pure functions."""

import math
from collections.abc import Iterator

from holdfast.faults.storage import KINDS
from holdfast.lab.matrix.analysis import Analysis, gain, reduction, share_above
from holdfast.lab.matrix.config import BLOCKING, OVERLAPPED, REFERENCE, VARIANTS
from holdfast.lab.result import Claim

STALL, WRITE = 0.57, 0.92  # the paper's reductions


def claims(analysis: Analysis) -> list[Claim]:
    """Return the claims that the measured runs confirm or refute, each with its measured value."""
    passed = [run.audit == "pass" for run in analysis.measured.values()]
    count, share = len(analysis.suites), sum(passed) / len(passed)
    gates = f"suites that pass all quality gates, of {count}"
    return [
        Claim("pass-rate", "runs that pass the audit, of all", "table 5: 1.0", (1, 1), share),
        Claim("gates", gates, "section 5.9", (1, 1), len(analysis.counted) / count),
        *_overlapped(analysis),
        *_exact(analysis),
    ]


def _overlapped(analysis: Analysis) -> Iterator[Claim]:
    """Yield claims that compare overlapped saves with blocking saves.

    Yield none if the matrix lacks one of the two variants, sweeps over settings, or plans storage faults."""
    has_faults = any(f.kind in KINDS for schedule in analysis.matrix.failures.values() for f in schedule)
    if not analysis.has(BLOCKING, OVERLAPPED) or analysis.matrix.sweep or has_faults:
        return
    pair, of = (OVERLAPPED, BLOCKING), Claim.of_estimate
    beats = analysis.paired(share_above, lambda run: run.goodput, *pair)
    yield of("beats", "suites in which overlapped has more goodput than blocking, of all that count", "table 6: 8 of 8", (1, 1), beats)  # fmt: skip
    gained = analysis.paired(gain, lambda run: run.goodput, *pair)
    yield of("gain", "goodput of overlapped over that of blocking, minus 1", "table 5: 0.032", (0, None), gained)
    stall = analysis.paired(reduction, lambda run: run.waited, *pair)
    yield of("stall", "stall of overlapped, reduced from that of blocking", "section 6.1: 57 %", (STALL, None), stall)
    written = analysis.paired(reduction, lambda run: run.written, *pair)
    yield of("write", "time on the training path for writing and queueing, reduced from that of blocking", "section 6.1: 92 %", (WRITE, None), written)  # fmt: skip


def _exact(analysis: Analysis) -> Iterator[Claim]:
    """Yield the claim that runs with exact recovery have the same losses as the reference run, which has no failures.

    Yield nothing if the matrix has no such runs, or if their number of workers changes."""
    exact = [name for name in analysis.variants if VARIANTS[name].is_exact and name != REFERENCE]
    if not (exact and analysis.has(REFERENCE)) or "workers_after" in analysis.matrix.sweep:
        return
    most = [analysis.loss_gap(suite, variant).most for suite in analysis.counted for variant in exact]
    words = f"largest difference of a loss from the reference's, under {', '.join(exact)}"
    largest = math.nan if any(map(math.isnan, most)) else max(most)
    yield Claim("exact", words, "ours; section 6.5: a mean of 0.07", (0, 0), largest)


def remarks(analysis: Analysis) -> list[str]:
    """Return remarks for the reader: how times are counted, which suites are left out, and what a save costs."""
    lines = [
        "Wall clock, and so goodput, counts everything from the start of the supervisor to the end of the last worker: "
        "start-up, every recovery, and the wait for saves that are still in flight at the end.",
        "Writing and queueing on the training path is the time that steps waited for a save to be written, handed over or "
        "accepted by the queue. No step waits for the last save: the wait at the end is in `closing`.",
    ]
    if analysis.failed:
        names = ", ".join(dict.fromkeys(failure.suite.name for failure in analysis.failed))
        lines.append(f"NOT COUNTED, because one of their runs failed a quality gate: {names}. The last table says why.")
    if analysis.has(BLOCKING, OVERLAPPED):
        # These decide whether overlapping can gain anything.
        size = analysis.mean(lambda run: float(run.bytes), BLOCKING) / 1e6
        step = analysis.mean(lambda run: run.seconds["compute"] / max(1, run.committed), BLOCKING)
        save, less = (analysis.mean(lambda run: run.waited / max(1, run.saves), how) for how in (BLOCKING, OVERLAPPED))
        lines.append(
            f"A save has {size:.3g} MB on average and a step takes {step:.3g} s; training waits {save:.3g} s for a blocking "
            f"save and {less:.3g} s for an overlapped one."
        )
    if stolen := [run.stolen for run in analysis.measured.values() if run.stolen is not None]:
        repeated = sum(run.tries > 1 for run in analysis.measured.values())
        lines.append(
            f"The host of this virtual machine gave {sum(stolen) / len(stolen):.1%} of its processors to others on average, "
            f"and at most {max(stolen):.1%} during a run that counts; {repeated} of {len(analysis.measured)} runs were "
            "repeated because of that."
        )
    return lines
