"""Whether a served run accounts for everything: every iteration told once, every block's every round, every loss."""

from collections import defaultdict
from pathlib import Path

import numpy as np

from holdfast import events
from holdfast.audit.verdicts import audit_run
from holdfast.history.log import read_history
from holdfast.sampler.digest import Samples
from holdfast.workloads.divided import DividedWorkload
from server_runs import checkpoint, told


def assert_accounted(out: Path, workload: DividedWorkload, iterations: int) -> None:
    """The history of a finished run is whole."""
    done = [event.iteration for event in told(out, events.Iterate)]
    assert sorted(set(done)) == list(range(iterations))
    assert len(done) == iterations
    _assert_rounds(out, workload, iterations)
    _assert_losses(out, workload)
    assert len(checkpoint(out, workload).saved_at) == len(workload.blocks)
    assert [each for each in audit_run(out) if each.verdict != "pass"] == []


def _assert_rounds(out: Path, workload: DividedWorkload, iterations: int) -> None:
    """In every round all blocks were changed, but for those of which it is told that they were not."""
    applied, dropped = defaultdict(list), defaultdict(list)
    for event in read_history(out).events:
        if isinstance(event.what, events.Applied):
            applied[event.what.iteration, event.what.round].append(event.what.blocks)
        elif isinstance(event.what, events.Dropped):
            dropped[event.what.iteration, event.what.round].append(event.what.blocks)
    everything = Samples.of(np.arange(len(workload.blocks)))
    assert len(applied) == iterations * workload.rounds
    for when, blocks in applied.items():
        changed = Samples.total(blocks)
        missing = Samples.total(dropped[when])
        # A node that is lost after it applied a round and before it said so has told of it in its own history.
        assert changed == everything or (missing.count and changed.count + missing.count >= everything.count), when
        assert changed.count <= everything.count, when


def _assert_losses(out: Path, workload: DividedWorkload) -> None:
    """Every block of a lost node came back, from a save that was committed before."""
    events_of = told(out, object)
    gone = [(e.kind, e.number) for e in events_of if isinstance(e, events.Lost) and e.kind != "controller"]
    assert len(set(gone)) == len(gone), "nobody is lost twice"
    saved = {0} | {event.step for event in events_of if isinstance(event, events.Commit)}
    lost: set[int] = set()
    for event in events_of:
        if isinstance(event, events.Lost):
            lost |= set(event.blocks)
        if isinstance(event, events.Restored):
            lost -= set(event.blocks)
            assert len(event.blocks) == len(event.saved_at)
    assert not lost
    assert saved
