"""How a run ends before its plan does: its script stops it or leaves its loop, on all ranks or on one."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # it is public

from epoch_training import BATCH, WINDOWS, Pushed, protected, step
from finished_run import different, events, failed_checks, last
from holdfast.audit.verdicts import audit_run
from holdfast.distributed.ranks import Ranks
from holdfast.progress import Progress
from holdfast.supervise.error_record import read_error, write_error
from holdfast.train.stopping import Stopping
from supervisor_process import SUPPORT, Start

SCRIPT = SUPPORT / "stopping_script.py"


def reason_of_end(out: Path) -> str:
    return next(finding.because for finding in audit_run(out) if finding.check == "reached_the_end")


def test_a_script_that_calls_stop_ends_the_run_at_the_next_boundary(tmp_path: Path) -> None:
    run, net, optimizer = protected(tmp_path, save_every=50)
    for batch in run.batches(Pushed(), global_batch=BATCH, num_epochs=3):
        step(net, optimizer, batch.data)
        if batch.step == 3:
            run.stop()
    run.close()
    assert last(tmp_path).step == 4
    assert failed_checks(tmp_path) == []
    assert reason_of_end(tmp_path) == "stopped by the script at step 4 of 9, on all ranks, in attempt 1"
    assert [each.what.step for each in events(tmp_path, "stopped")] == [4]
    assert protected(tmp_path)[0].batches(Pushed(), global_batch=BATCH, num_epochs=3).initial == 4


@pytest.mark.parametrize("stops", [True, False])
def test_a_run_whose_loop_was_left_is_unfinished(tmp_path: Path, caplog: pytest.LogCaptureFixture, stops: bool) -> None:
    run, net, optimizer = protected(tmp_path, save_every=2)
    for batch in run.batches(Pushed(), global_batch=BATCH, num_epochs=3):
        step(net, optimizer, batch.data)
        if batch.step == 4:
            if stops:
                run.stop()
            break
    run.close()
    assert "the script left its loop in step 4, before the end of the run (step 9)" in caplog.text
    assert events(tmp_path, "stopped") == []
    assert last(tmp_path).step == 4
    run, net, optimizer = protected(tmp_path, save_every=2)
    assert next(iter(run.batches(Pushed(), global_batch=BATCH, num_epochs=3))).step == 4


def test_a_run_that_was_stopped_is_done_and_can_be_extended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for extend, trained in ((False, [0, 1, 2]), (False, []), (True, [3, 4, 5, 6, 7, 8])):
        run, net, optimizer = protected(tmp_path, extend=extend)
        seen = []
        for epoch in run.epochs(Pushed(), global_batch=BATCH, num_epochs=3):
            for batch in epoch:
                step(net, optimizer, batch.data)
                seen.append(batch.step)
            if not extend:
                run.stop()
        run.close()
        assert seen == trained
        assert failed_checks(tmp_path) == []
    assert "this run is done at step 3: nothing is left to train" in caplog.text


def test_a_run_is_extended_by_declaration_only(tmp_path: Path) -> None:
    def train(epochs: int, **how: Any) -> list[int]:
        run, net, optimizer = protected(tmp_path, **how)
        seen = []
        for batch in run.batches(Pushed(), global_batch=BATCH, num_epochs=epochs):
            step(net, optimizer, batch.data)
            seen.append(batch.step)
        run.close()
        return seen

    assert train(2) == [*range(2 * WINDOWS)]
    with pytest.raises(Exception, match=r"has 9 steps now, and the run in .* was to train 6: give --extend"):
        train(3)
    assert train(3, extend=True) == [*range(2 * WINDOWS, 3 * WINDOWS)]
    assert failed_checks(tmp_path) == []
    with pytest.raises(
        Exception, match=r"was to train 9 steps and has trained 9, and now its plan has 6: .* not shorter"
    ):
        train(2, extend=True)
    assert failed_checks(tmp_path) == []
    plan = next(each.because for each in audit_run(tmp_path) if each.check == "one_plan")
    assert "extended from 6 to 9 steps" in plan


def world(store: HashStore, rank: int, size: int) -> Ranks:
    return Ranks(rank=rank, size=size, store=store, grouped=False, device=torch.device("cpu"), patience=30.0)


def test_ranks_whose_scripts_ask_at_the_same_boundary_stop_there() -> None:
    """Whoever asks, whenever the others hear of it."""
    store = HashStore()
    several = [Stopping(world(store, rank, 3), 0) for rank in range(3)]
    for step_ in range(5):
        assert not any(each.is_here(step_) for each in several)
    for each in several:
        each.request()
    found: list[bool] = []
    threads = [threading.Thread(target=lambda each=each: found.append(each.is_here(5))) for each in several]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [True] * 3
    assert all(each.wanted for each in several)


def test_one_rank_ends_the_run_for_all_at_the_end_of_an_epoch() -> None:
    store = HashStore()
    several = [Stopping(world(store, rank, 3), 0) for rank in range(3)]
    several[1].request()

    def ends(each: Stopping) -> None:
        each.agree(7)
        found.append((each.wanted, each.is_here(7)))

    found: list[tuple[bool, bool]] = []
    threads = [threading.Thread(target=ends, args=(each,)) for each in several]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [(True, True)] * 3


def run_script(tmp_path: Path, start: Start, task: dict[str, Any], **how: Any) -> Any:
    return start(task, script=SCRIPT, workers=2, save_every=3, **how)


def test_a_run_of_two_ranks_is_stopped_finished_and_extended(tmp_path: Path, start: Start) -> None:
    job = run_script(tmp_path, start, {"stop_at": 1, "rank": 1})
    assert job.result() == {"verdict": "completed", "because": "stopped by the script at step 6", "attempts": 1}
    assert failed_checks(job.out) == []
    again = run_script(tmp_path, start, {"stop_at": 1, "rank": 1}).result()
    assert again["verdict"] == "completed"
    assert again["because"].startswith("this run is done, stopped by the script at step 6: nothing was started")
    extended = run_script(tmp_path, start, {"stop_at": 1, "rank": 1}, extend=True)
    assert extended.result()["because"] == "all workers have finished"
    assert failed_checks(job.out) == []
    assert last(job.out).step == 9


def test_a_loop_that_one_rank_leaves_is_a_failure_of_the_script(start: Start) -> None:
    """The other rank waits for it in a sum; it exits with status 0 in the middle of its loop."""
    job = start({"break_at": 4, "rank": 1}, script=SCRIPT, workers=2, save_every=3)
    found = job.result()
    assert found["verdict"] == "script-error", job.stderr
    assert "in the middle of its loop, at step 4" in found["because"]
    assert "the script left its loop in step 4, before the end of the run" in job.stderr


@pytest.mark.parametrize("how", ["os", "sys"])
def test_to_exit_with_0_in_the_middle_of_the_loop_is_a_failure_of_the_script(start: Start, how: str) -> None:
    task = {"exit_at": 5, "how": how}
    job = start(task, script=SCRIPT, workers=2, save_every=3)
    found = job.result()
    assert (found["verdict"], found["attempts"]) == ("script-error", 2), job.stderr
    assert "exited with status 0 in the middle of its loop, at step 5 (to end a run early" in found["because"]
    assert "it came again at step 5" in found["because"]
    assert [each.what.kind for each in job.events("detect")] == ["exit", "exit"]


def test_a_worker_that_dies_after_the_loop_does_not_start_an_empty_one(tmp_path: Path, start: Start) -> None:
    job = run_script(tmp_path, start, {"after": "raise"})
    found = job.result()
    assert (found["verdict"], found["attempts"]) == ("script-error", 1)
    assert "after its loop; the run itself was trained to its end, step 9, and its state is saved" in found["because"]
    assert failed_checks(job.out) == []
    assert "this run is done" in run_script(tmp_path, start, {"after": "raise"}).result()["because"]


@pytest.mark.parametrize("recovery", ["restart", "replay"])
def test_ranks_killed_at_the_end_of_an_epoch_stop_with_the_same_bits(start: Start, recovery: str) -> None:
    how = {"script": SCRIPT, "workers": 2, "save_every": 2, "recovery": recovery}
    whole, struck = (
        start({"stop_at": 1, "rank": 1}, out=out, failures=failures, **how)
        for out, failures in (
            ("whole", []),
            ("struck", [{"step": 3, "kind": "kill", "targets": [1]}, {"step": 5, "kind": "kill"}]),
        )
    )
    for job in (whole, struck):
        assert job.result()["because"] == "stopped by the script at step 6", job.stderr
    assert failed_checks(struck.out) == []
    assert different(whole.out, struck.out) == []


class Broken(Pushed):
    """A sample of it cannot be loaded."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            raise OSError("cannot read the image")
        return super().__getitem__(index)


def test_a_sample_that_raises_is_named_by_its_id(tmp_path: Path) -> None:
    run, *_ = protected()
    batches = run.batches(Broken(), global_batch=BATCH, num_epochs=3)
    with pytest.raises(OSError, match="cannot read") as error:
        list(batches)
    assert error.value.__notes__ == ["sample 7 raised this"]
    memory = Progress()
    write_error(tmp_path / "error.json", memory, error.value, __file__)
    raised = read_error(tmp_path / "error.json", memory)
    assert raised is not None
    assert raised.message == "OSError: cannot read the image (sample 7 raised this)"


def test_a_process_that_the_script_forks_in_its_loop_has_no_part_in_the_run(tmp_path: Path, start: Start) -> None:
    job = run_script(tmp_path, start, {"fork_at": 4})
    assert job.result()["verdict"] == "completed", job.stderr
    assert failed_checks(job.out) == []
    assert last(job.out).step == 9


class Slow:
    """A store that takes its time to answer, once somebody has asked."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.asked.set()
        threading.Event().wait(0.2)
        return False


def test_nobody_asks_the_store_after_the_loop_has_ended() -> None:
    """A thread that comes back from the store while the interpreter ends aborts the process."""
    others, store = threading.enumerate(), Slow()
    stopping = Stopping(world(store, 0, 2), 0)  # type: ignore[arg-type]  # it knows enough of a store
    assert store.asked.wait(30)

    stopping.close()

    assert set(threading.enumerate()) <= set(others)
