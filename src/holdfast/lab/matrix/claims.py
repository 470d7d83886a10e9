"""What a matrix is to show, beside what it measured. Pure."""

import math
from collections.abc import Iterator

from holdfast.faults.storage import KINDS
from holdfast.lab.confidence import ConfidenceInterval
from holdfast.lab.matrix.analysis import Analysis, gain, reduction, share_above
from holdfast.lab.matrix.config import BLOCKING, OVERLAPPED, REFERENCE, VARIANTS
from holdfast.lab.result import Claim

STALL, WRITE = 0.57, 0.92  # the paper's reductions


def claims(found: Analysis) -> list[Claim]:
    """The claims that these runs can decide."""
    return [*_correct(found), *_compared(found), *_same(found)]


def _correct(found: Analysis) -> Iterator[Claim]:
    passed = [run.audit == "pass" for run in found.found.values()]
    count = len(found.suites)
    yield _claim(
        "pass-rate", "runs that pass the audit, of all", "table 5: 1.0", (1, 1), _plain(sum(passed) / len(passed))
    )
    yield _claim("gates", f"suites that pass all quality gates, of {count}", "section 5.9", (1, 1), _plain(len(found.counted) / count))  # fmt: skip


def _compared(found: Analysis) -> Iterator[Claim]:
    """Overlapped against blocking, as the paper compares them: a sweep, or a disk that fails, shows where that ends."""
    if not found.has(BLOCKING, OVERLAPPED) or found.matrix.sweep or _has_faults(found):
        return
    pair = (OVERLAPPED, BLOCKING)
    beats = found.paired(share_above, lambda run: run.goodput, *pair)
    yield _claim("beats", "suites in which overlapped has more goodput than blocking, of all that count", "table 6: 8 of 8", (1, 1), beats)  # fmt: skip
    gained = found.paired(gain, lambda run: run.goodput, *pair)
    yield _claim("gain", "goodput of overlapped over that of blocking, less 1", "table 5: 0.032", (0, None), gained)
    stall = found.paired(reduction, lambda run: run.waited, *pair)
    yield _claim("stall", "stall of overlapped, reduced from that of blocking", "section 6.1: 57 %", (STALL, None), stall)  # fmt: skip
    written = found.paired(reduction, lambda run: run.written, *pair)
    yield _claim("write", "time on the training path for writing and queueing, reduced from that of blocking", "section 6.1: 92 %", (WRITE, None), written)  # fmt: skip


def _same(found: Analysis) -> Iterator[Claim]:
    """Exact recoveries train what a run without failures trains; with another number of workers sums round otherwise."""
    exact = [name for name in found.variants if VARIANTS[name].is_exact and name != REFERENCE]
    if not (exact and found.has(REFERENCE)) or "workers_after" in found.matrix.sweep:
        return
    most = [found.apart(suite, variant).most for suite in found.counted for variant in exact]
    text = f"largest difference of a loss from the reference's, under {', '.join(exact)}"
    yield _claim("exact", text, "ours; section 6.5: a mean of 0.07", (0, 0), _plain(_largest(most)))


def _has_faults(found: Analysis) -> bool:
    """Whether storage fails on purpose."""
    return any(each.kind in KINDS for schedule in found.matrix.failures.values() for each in schedule)


def _largest(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


def _plain(value: float) -> ConfidenceInterval:
    return ConfidenceInterval(value, math.nan, math.nan)


def _claim(
    ident: str, text: str, source: str, expected: tuple[float | None, float | None], of: ConfidenceInterval
) -> Claim:
    known = None if math.isnan(of.low) else (of.low, of.high)
    return Claim(id=ident, claim=text, source=source, expected=expected, measured=of.value, interval=known)
