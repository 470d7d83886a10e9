"""Runs whose samples come in the order of a sampler: killed, they end with the same bits, and the audit agrees."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finished_run import different, events, failed_checks
from holdfast.audit.verdicts import audit_run
from holdfast.sampler.orders import read_piece
from supervisor_process import SUPPORT, Start, Supervisor

SCRIPT = SUPPORT / "sampler_script.py"
KILLS = [{"step": 3, "kind": "kill", "targets": [1]}, {"step": 13, "kind": "kill", "targets": [0]}]


def completed(job: Supervisor) -> Path:
    result = job.result()
    assert result.get("verdict") == "completed", (result, job.stderr)
    return job.out


def trains(start: Start, kind: str, **how: Any) -> Path:
    return completed(start(script=SCRIPT, args=[kind], workers=2, save_every=4, **how))


def orders(out: Path) -> dict[int, set[tuple[int, ...]]]:
    """Return the orders that were recorded for each epoch."""
    found: dict[int, set[tuple[int, ...]]] = {}
    for event in events(out, "order"):
        ids = read_piece(event.what.width, event.what.indices)
        found.setdefault(event.what.epoch, set()).add(tuple(ids.tolist()))
    return found


@pytest.mark.parametrize("recovery", ["restart", "replay"])
@pytest.mark.parametrize("kind", ["weighted", "function"])
def test_killed_twice_a_run_with_a_sampler_ends_with_the_bits_of_a_run_that_never_failed(
    start: Start, start_reference: Start, kind: str, recovery: str
) -> None:
    reference = trains(start_reference, kind)
    out = trains(start, kind, failures=KILLS, recovery=recovery)
    assert different(reference, out) == []
    assert failed_checks(reference) == []
    assert failed_checks(out) == []
    assert all(len(of_epoch) == 1 for of_epoch in orders(out).values())
    assert orders(reference) == orders(out)


def test_every_epoch_is_drawn_anew_and_the_audit_says_that_a_sampler_chose_the_samples(start_reference: Start) -> None:
    out = trains(start_reference, "weighted")
    drawn = [next(iter(of_epoch)) for of_epoch in orders(out).values()]
    assert len(drawn) == len(set(drawn)) == 5
    assert np.mean(drawn) > 35  # large indices have large weights
    findings = {finding.check: finding.because for finding in audit_run(out)}
    assert "those that the sampler returned, in its order" in findings["every_sample_trained_once"]


@pytest.mark.parametrize("sampler", ["subset", "doubled"])
@pytest.mark.parametrize("recovery", ["forward", "skip"])
def test_samples_that_a_lossy_recovery_leaves_out_are_declared_by_their_index(
    start: Start, recovery: str, sampler: str
) -> None:
    failures = [{"step": 6, "kind": "kill", "targets": [0], "point": "backward=0.0"}]
    out = trains(start, sampler, failures=failures, recovery=recovery)
    missing = {sample for event in events(out, "regroup") for sample in event.what.missing}
    assert missing
    assert all(sample % 2 == 0 for sample in missing)  # the samplers return no others
    assert failed_checks(out) == []


def test_with_another_number_of_workers_the_same_samples_are_trained(start: Start) -> None:
    out = trains(start, "weighted", failures=KILLS, workers_after=[3, 1])
    assert {event.what.world for event in events(out, "step")} == {2, 3, 1}
    assert failed_checks(out) == []
