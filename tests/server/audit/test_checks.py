"""The audit of the parameter server: runs that could have happened pass, and no forged history of one does.

A forgery changes one thing that matters in the history of a correct run. By hand, for more of them:
`PYTHONPATH=tests/support python tests/server/audit/test_checks.py --count 20000`.
"""

import argparse
import random
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_server_runs import NOON, PlayedRun, play_run
from forged_server_runs import FORGERIES, Files, because, found, places
from holdfast.audit.verdicts import audit, worst
from holdfast.events import Restored, Serve


def forged(seed: int, name: str) -> tuple[PlayedRun, Files | None]:
    rng = random.Random(seed)
    run = play_run(rng, rng.choice([0.0, 0.02, 0.05, 0.15]))
    return run, FORGERIES[name](rng, run, {who: list(events) for who, events in run.files.items()})


@given(st.integers(0, 1 << 32), st.sampled_from([0.0, 0.01, 0.05, 0.2, 0.4]))
@settings(max_examples=60, deadline=None)
def test_a_run_that_could_have_happened_passes(seed: int, failing: float) -> None:
    files = dict(play_run(random.Random(seed), failing).files)

    assert worst(found(files)) == "pass", because(files)


@given(st.integers(0, 1 << 32), st.sampled_from([0.0, 0.05, 0.2, 0.4]), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_a_run_that_was_interrupted_at_any_moment_does_not_fail(seed: int, failing: float, ended: float) -> None:
    run = play_run(random.Random(seed), failing)
    last = NOON + ended * (run.now - NOON)
    files = {who: [event for event in events if event.time <= last] for who, events in run.files.items()}

    assert worst(found({who: events for who, events in files.items() if events})) != "fail", because(files)


@pytest.mark.parametrize("name", FORGERIES)
def test_no_forged_history_passes(name: str) -> None:
    applies = 0
    for seed in range(40):
        _, files = forged(seed, name)
        if files is None:
            continue
        applies += 1
        assert worst(found(files)) != "pass", f"seed {seed}"
        if applies == 8:
            break
    assert applies


def test_a_block_without_an_owner_names_no_node() -> None:
    """A block without an owner at the choice is in no node's save."""
    text = ""
    for seed in (1, 3, 5):
        files = dict(play_run(random.Random(seed), 0.2).files)
        _, line = places(files, Restored, who="controller")[0]
        text += because(files | {"controller": files["controller"][:line] + files["controller"][line + 1 :]})
    assert "node--" not in text
    assert "which had no owner at the choice" in text


def test_files_may_be_read_in_any_order() -> None:
    run = play_run(random.Random(5), 0.1)
    events = [event for who in sorted(run.files, reverse=True) for event in run.files[who]]

    assert worst(audit(events)) == "pass"


@pytest.mark.parametrize("which", ["blocks", "nodes", "workers"])
def test_a_plan_with_impossible_sizes_does_not_pass(which: str) -> None:
    run = play_run(random.Random(1), 0.0)
    much = {"blocks": 10**18} | {which: 10**18}
    events = [event for who in sorted(run.files) for event in run.files[who]]
    forged = [e._replace(what=e.what._replace(**much)) if isinstance(e.what, Serve) else e for e in events]

    assert worst(audit(forged)) != "pass"


def test_a_run_without_losses_is_reported_as_such() -> None:
    reasons = {finding.check: finding.because for finding in found(dict(play_run(random.Random(1), 0.0).files))}

    assert reasons["lost_blocks_came_back"] == "no block was lost"
    assert reasons["parts_change_hands_only_by_loss"] == "every worker had its own part"


def test_a_run_that_waits_for_blocks_of_lost_nodes_is_not_judged() -> None:
    seed = next(seed for seed in range(99) if places(dict(play_run(random.Random(seed), 0.1).files), Restored))
    files = dict(play_run(random.Random(seed), 0.1).files)
    at = places(files, Restored, who="controller")[0][1]
    files["controller"] = files["controller"][:at]

    assert worst(found(files)) in ("unknown", "fail")
    findings = {finding.check: finding for finding in found(files)}
    assert findings["lost_blocks_came_back"].verdict == "unknown"
    assert findings["reached_the_end"].verdict == "unknown"


def main() -> int:
    """Forge by the thousands, and show what passed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    wrong: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.count):
        rng = random.Random(seed)
        files = dict(play_run(rng, rng.choice([0.0, 0.02, 0.05, 0.15])).files)
        if worst(found(files)) != "pass":
            wrong["honest"] += 1
            sys.stdout.write(f"seed {seed}: an honest history did not pass\n{because(files)}\n")
        name = sorted(FORGERIES)[seed % len(FORGERIES)]
        lied = forged(seed, name)[1]
        if lied is not None and worst(found(lied)) == "pass":
            wrong[name] += 1
            sys.stdout.write(f"seed {seed}: {name} passed\n")
    sys.stdout.write(f"{dict(wrong) or f'{options.count} runs and forgeries, none misjudged'}\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
