"""How a run stands, as text that Prometheus reads."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from holdfast.watch.run_state import Now, RunState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metric(NamedTuple):
    """One number, or one for each value of a label."""

    name: str
    kind: str
    about: str
    values: Mapping[str, float | None]  # by label and value, such as rank="0"; an empty label for the only one


def text(seen: RunState, now: Now) -> str:
    """Every metric with what it means; what is not known is left out."""
    run = _label("run", str(now.folder))
    return "".join(line for metric in _metrics(seen, now) for line in _lines(metric, run))


def _metrics(seen: RunState, now: Now) -> Iterator[Metric]:
    def gauge(name: str, about: str, value: float | None) -> Metric:
        return Metric(name, "gauge", about, {"": value})

    def counter(name: str, about: str, value: float) -> Metric:
        return Metric(name, "counter", about, {"": value})

    yield gauge("up", "Whether somebody trains in this run now.", float(now.trains))
    yield gauge("step", "Steps trained so far, or iterations of a served run.", seen.reached)
    yield gauge("steps_planned", "Steps that are to be trained.", seen.planned)
    yield gauge("steps_committed", "Steps that would come back after a failure now.", seen.committed)
    yield gauge("goodput_steps_per_second", "Committed steps per second of wall clock, of the whole run.", now.goodput)
    yield gauge("speed_steps_per_second", "Steps per second of late.", seen.speed)
    yield gauge("seconds_left", "Seconds that the rest takes at the present speed.", seen.seconds_left)
    yield gauge("loss", "The last loss that was told.", seen.loss)
    yield gauge("workers", "Workers that take part.", seen.served.workers if seen.served else seen.run.workers)
    yield counter("restarts_total", "Restarts of all workers.", seen.run.restarts)
    failures = {_label("kind", kind): float(count) for kind, count in sorted(seen.failures.items())}
    yield Metric("failures_total", "counter", "Failures that were detected, by kind.", failures)
    yield counter("samples_lost_total", "Samples that live recoveries declared lost.", seen.samples_lost)
    yield counter("saves_total", "Saves that were made.", seen.saves)
    yield counter("saved_bytes_total", "Bytes of all saves.", seen.saved_bytes)
    yield counter("stall_seconds_total", "Seconds in which training waited for saves.", seen.stalled)
    steps = {_label("rank", str(rank)): float(each.step) for rank, each in sorted(seen.ranks.items())}
    yield Metric("rank_step", "gauge", "Steps that a rank has trained.", steps)
    heard = {_label("rank", str(rank)): each.heard for rank, each in sorted(seen.ranks.items())}
    yield Metric("rank_heard_seconds", "gauge", "When a rank last said something, in seconds since 1970.", heard)


def _lines(metric: Metric, run: str) -> Iterator[str]:
    known = {label: value for label, value in metric.values.items() if value is not None}
    if not known:
        return
    name = f"holdfast_{metric.name}"
    yield f"# HELP {name} {metric.about}\n# TYPE {name} {metric.kind}\n"
    for label, value in known.items():
        yield f"{name}{{{','.join(filter(None, (run, label)))}}} {_number(value)}\n"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _label(name: str, value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{name}="{escaped}"'
