"""Folded steps are audited like lines: the samples of some are computed again, and no memory is kept for them."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from fake_histories import write_history
from folded_histories import as_folded
from holdfast.audit import sample_checks
from holdfast.audit.rank_session import RankSession
from holdfast.audit.run_record import RunRecord
from holdfast.audit.step_columns import counting, shared_part, whole_part
from holdfast.audit.verdicts import audit_files, audit_run, worst
from holdfast.errors import Corrupt
from holdfast.events import Attempt, Commit, Done, Event, Open, Plan, Recover, Regroup, Seconds, Step
from holdfast.history import fold, panel
from holdfast.sampler.digest import Samples
from holdfast.sampler.plan import SamplePlan

PLAN = SamplePlan(samples=6400, batch=8, epochs=1, seed=7)


def share(step: int, rank: int, state: str | None = None) -> Step:
    samples = Samples.of(PLAN.share(PLAN.position(step), rank, 2))
    place = (1, 2, rank, *PLAN.position(step), step)
    return Step(*place, samples, Seconds(0.0, 0.001, 0.0), state or f"{step:016x}{rank:016x}", 1, 0, 1, step / 8)


def files() -> dict[str, list[Event]]:
    """Return the history of a run of two ranks and 800 steps, with a save every 400 steps."""
    return {name: list(events) for name, events in whole_run().items()}


@cache
def whole_run() -> dict[str, list[Event]]:
    how = Plan(1, PLAN.samples, PLAN.batch, PLAN.epochs, PLAN.seed, 400, "blocking", "c")
    history: dict[str, list[Event]] = {}
    for rank in (0, 1):
        steps = [what for n in range(PLAN.steps) for what in (share(n, rank), Commit(1, n + 1, 1, state=f"{n}"))]
        kept = [what for what in steps if isinstance(what, Step) or (rank == 0 and what.step % 400 == 0)]
        whats = [Open(2), Attempt(1, 2, rank, 7), how, Recover(1, None, 0, 0, "keyed", 0.1), *kept, Done(1, 800)]
        history[f"rank-{rank}"] = [Event(1.7e9 + i / 100, f"rank-{rank}", what) for i, what in enumerate(whats)]
    return history


def session(folder: Path, history: dict[str, list[Event]], who: str = "rank-0") -> RankSession:
    record = RunRecord()
    for file, item in as_folded(history, folder):
        record.add(item, file) if isinstance(item, Event) else record.add_run(item, file)
    return record.sessions[who][0]


def test_columns_of_folded_steps_equal_those_of_lines(tmp_path: Path) -> None:
    history = files()
    folded, lines = session(tmp_path, history).steps, RunRecord(history["rank-0"]).sessions["rank-0"][0].steps
    for name in ("step", "epoch", "cursor", "count", "state", "shared", "reduced", "loss", "worked", "stepped"):
        np.testing.assert_array_equal(getattr(folded, name), getattr(lines, name))
    rows = np.array([0, 5, 399, 400, 799])
    np.testing.assert_array_equal(folded.digests(rows), lines.digests(rows))
    assert folded.samples(401) == lines.samples(401)
    assert (len(folded), folded.last, folded.is_consecutive) == (800, 799, True)


def test_the_state_after_a_step_is_that_of_its_first_row(tmp_path: Path) -> None:
    history = files()
    history["rank-0"].insert(500, history["rank-0"][40])  # no longer consecutive
    (tmp_path / "odd").mkdir()
    for steps in (
        session(tmp_path, files()).steps,
        session(tmp_path / "odd", history).steps,
        RunRecord(history["rank-0"]).sessions["rank-0"][0].steps,
    ):
        for step in (0, 36, 399, 400, 799):
            assert steps.shared_after(step) == steps.shared[steps.step == step][0]
        assert [steps.shared_after(step) for step in (-1, 800)] == [None, None]
    assert RankSession("rank-0", 0, None).steps.shared_after(0) is None


def test_the_hash_of_a_fingerprint_is_that_of_its_words() -> None:
    states = ["0" * 32, "f" * 32, "ab" * 16, "0" * 16 + "1" * 16]
    assert len({whole_part(state) for state in states}) == 4
    assert 0 not in {*map(shared_part, states), *map(whole_part, states)}
    assert shared_part("odd") != shared_part("xdd")


def test_counting_is_shared_and_right() -> None:
    assert counting(7, 3).tolist() == [7, 8, 9]
    assert counting(5, 200_000)[-1] == 200_004
    assert counting(1 << 40, 2).tolist() == [1 << 40, (1 << 40) + 1]
    assert np.shares_memory(counting(0, 10), counting(5, 10))


def test_only_a_few_samples_of_folded_steps_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = files()
    computed: list[int] = []
    real = Samples.sums
    monkeypatch.setattr(Samples, "sums", lambda rows: computed.append(len(rows)) or real(rows))  # type: ignore[func-returns-value]
    assert worst(audit_files((name, event) for name in history for event in history[name])) == "pass"
    everything, _ = sum(computed), computed.clear()
    folded = list(as_folded(history, tmp_path))
    computed.clear()
    assert worst(audit_files(folded)) == "pass"
    assert 0 < sum(computed) < everything / 2


def test_samples_that_were_not_recorded_are_found_when_they_are_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panel, "proofs_of", lambda digests: np.zeros(-(-len(digests) // 256), np.uint64))
    folded = list(as_folded(files(), tmp_path))
    monkeypatch.undo()
    with pytest.raises(Corrupt, match="are not those it recorded"):
        audit_files(folded)


@pytest.mark.parametrize("changed", [{"seed": 8}, {"batch": 4}, {"samples": 6401}])
def test_folded_samples_are_compared_with_the_plan_of_the_run(tmp_path: Path, changed: dict[str, int]) -> None:
    history, folded = files(), list(as_folded(files(), tmp_path))
    other = [
        (
            name,
            item._replace(what=item.what._replace(**changed))
            if isinstance(getattr(item, "what", None), Plan)
            else item,
        )
        for name, item in folded
    ]
    lines = [
        (name, event._replace(what=event.what._replace(**changed)) if isinstance(event.what, Plan) else event)
        for name in sorted(history)
        for event in history[name]
    ]
    assert audit_files(other) == audit_files(lines)  # type: ignore[arg-type]
    assert worst(audit_files(other)) == "fail"  # type: ignore[arg-type]


def test_a_regroup_between_folded_steps_begins_new_rows(tmp_path: Path) -> None:
    history = files()
    history["rank-0"].insert(300, Event(1.7e9, "rank-0", Regroup(1, 1, 295, "forward", (0, 1))))
    assert audit_files(as_folded(history, tmp_path)) == audit_files((n, e) for n in sorted(history) for e in history[n])


def test_a_folder_is_audited_alike_before_and_after_it_is_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fold, "KEPT", 1000)
    write_history(tmp_path / "history", files())
    before = audit_run(tmp_path)
    assert worst(before) == "pass"
    assert fold.fold(tmp_path / "history", least=1) == 1
    assert audit_run(tmp_path) == before


def test_every_block_is_computed_by_some_rank() -> None:
    blocks = {
        block for rank in range(64) for block in range((7 * rank) % sample_checks.PROVED, 64, sample_checks.PROVED)
    }
    assert blocks == {*range(64)}
