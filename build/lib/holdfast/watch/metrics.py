"""The state of a run in the Prometheus text format."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from holdfast.printable import printable
from holdfast.watch.run_state import CurrentState, RunState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metric(NamedTuple):
    """A Prometheus metric: its name, its type (`kind`), its help text (`about`) and its values by label."""

    name: str
    kind: str
    about: str
    values: Mapping[str, float | None]  # by label, for example rank="0"; an empty label for a single number


def text(run: RunState, now: CurrentState) -> str:
    label = _label("run", str(now.folder))
    return "".join(line for metric in _metrics(run, now) for line in _lines(metric, label))


def _metrics(run: RunState, now: CurrentState) -> Iterator[Metric]:
    def gauge(name: str, about: str, value: float | None) -> Metric:
        return Metric(name, "gauge", about, {"": value})

    def counter(name: str, about: str, value: float) -> Metric:
        return Metric(name, "counter", about, {"": value})

    yield gauge("up", "1 if the run trains now.", float(now.trains))
    yield gauge("step", "Steps trained so far, or iterations of a parameter server.", run.reached)
    yield gauge("steps_planned", "Steps of the whole run.", run.planned)
    yield gauge("steps_committed", "Steps that would be restored after a failure now.", run.committed)
    yield gauge("goodput_steps_per_second", "Committed steps per second of wall clock, of the whole run.", now.goodput)
    yield gauge("speed_steps_per_second", "Steps per second in the last steps.", run.speed)
    yield gauge("seconds_left", "Seconds left at the present speed.", run.seconds_left)
    yield gauge("loss", "The last logged loss.", run.loss)
    yield gauge("workers", "Workers that take part.", run.served.workers if run.served else run.lineage.workers)
    yield counter("restarts_total", "Restarts of all workers.", run.lineage.restarts)
    failures = {_label("kind", kind): float(count) for kind, count in sorted(run.failures.items())}
    yield Metric("failures_total", "counter", "Detected failures by kind.", failures)
    yield counter("samples_lost_total", "Samples that live recoveries declared lost.", run.samples_lost)
    yield counter("saves_total", "Saves.", run.saves)
    yield counter("saved_bytes_total", "Bytes of all saves.", run.saved_bytes)
    yield counter("stall_seconds_total", "Seconds in which training waited for saves.", run.stalled)
    steps = {_label("rank", str(number)): float(rank.step) for number, rank in sorted(run.ranks.items())}
    yield Metric("rank_step", "gauge", "Steps trained by a rank.", steps)
    heard = {_label("rank", str(number)): rank.heard for number, rank in sorted(run.ranks.items())}
    yield Metric("rank_heard_seconds", "gauge", "Time of the last event of a rank, in seconds since 1970.", heard)


def _lines(metric: Metric, run_label: str) -> Iterator[str]:
    known = {label: value for label, value in metric.values.items() if value is not None}
    if not known:
        return
    name = f"holdfast_{metric.name}"
    yield f"# HELP {name} {metric.about}\n# TYPE {name} {metric.kind}\n"
    for label, value in known.items():
        yield f"{name}{{{','.join(filter(None, (run_label, label)))}}} {_number(value)}\n"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _label(name: str, value: str) -> str:
    lines = [printable(part).replace("\\", "\\\\").replace('"', '\\"') for part in value.split("\n")]
    return name + '="' + "\\n".join(lines) + '"'
