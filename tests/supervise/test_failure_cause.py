"""The first failure has a cause of its own; workers that only lost a peer are not blamed."""

import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.history.tail import Finish
from holdfast.supervise.error_record import RaisedException
from holdfast.supervise.failure_cause import WorkerExit, first_failure, surrender
from holdfast.supervise.restart_policy import RestartPolicy
from holdfast.supervise.verdict import RunVerdict, done_before

# Errors that peers of a dead worker raised.
CONNECTION_ERRORS = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:17313",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:525] Read error [127.0.0.1]:1: Connection reset by peer",
    "RuntimeError: Application timeout caused pair closure",
    "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:133] Timed out waiting 10000ms for recv operation to complete",
    "DistBackendError: NCCL error: remote process exited or there was a network error",
    "DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed.",
    "RuntimeError: Broken pipe",
)
peer_error = st.builds(RaisedException, st.sampled_from(CONNECTION_ERRORS), st.just("Traceback ..."), st.floats(0, 9))
consequences = st.one_of(
    st.tuples(st.none(), st.none()),  # it still runs
    st.tuples(st.sampled_from([1, None]), peer_error),
    st.tuples(st.just(-signal.SIGABRT), st.none()),  # C++ did not catch the lost connection
)


def own(message: str, time: float) -> RaisedException:
    return RaisedException(message, f"Traceback ...\n{message}", time)


causes = st.one_of(
    st.tuples(st.just("signal"), st.sampled_from([-signal.SIGKILL, -signal.SIGSEGV]), st.none()),
    st.tuples(st.just("exit"), st.sampled_from([1, 3, 137]), st.none()),
    st.tuples(st.just("error"), st.sampled_from([1, None]), st.builds(own, st.just("ValueError: no"), st.floats(0, 9))),
    st.tuples(st.just("hang"), st.just(-signal.SIGKILL), st.none()),
)


def test_a_corruption_is_the_failure_of_the_rank_whose_state_is_wrong() -> None:
    text = "rank 2 had another state than the other 2 ranks (weight) before step 100"
    for culprit, rank in ((2, 2), (None, -1)):
        raised = RaisedException(text, "", 1.0, "corruption", culprit=culprit)
        killed = WorkerExit(rank=1, local_rank=1, exit=-signal.SIGKILL)
        workers = [WorkerExit(rank=0, local_rank=0, exit=1, raised=raised), killed, WorkerExit(rank=2, local_rank=2, exit=None, step=103)]  # fmt: skip
        found = first_failure(workers)
        assert (found.kind, found.rank, found.line) == ("corruption", rank, text)
        assert not found.is_error
        assert RestartPolicy(3, None).after(found, None) is None


def test_why_the_survivors_could_not_recover_is_known_when_they_fail_together_with_the_lost_worker() -> None:
    killed = WorkerExit(rank=0, local_rank=0, exit=-signal.SIGKILL)
    broken = WorkerExit(rank=3, local_rank=3, exit=1, raised=RaisedException(CONNECTION_ERRORS[0], "...", 0.5))
    workers = [
        WorkerExit(rank=rank, local_rank=rank, exit=1, raised=RaisedException(f"no {rank}", "", time, "peer"))
        for rank, time in ((1, 2.0), (2, 1.0))
    ]
    assert first_failure([killed, broken, *workers]).line == "rank 0 was killed by SIGKILL"
    reason = surrender([killed, broken, *workers])
    assert reason is not None
    assert (reason.kind, reason.line) == ("peer", "rank 2 cannot continue: no 2")
    assert surrender([killed, broken]) is None


def test_a_worker_that_leaves_its_loop_with_0_is_tried_once_more_and_then_the_script_is_blamed() -> None:
    peer = WorkerExit(
        rank=0, local_rank=0, exit=1, raised=RaisedException(CONNECTION_ERRORS[0], "Traceback ...", 1.0), step=8
    )
    lost = first_failure([peer, WorkerExit(rank=1, local_rank=1, exit=0, midway=True, step=8)])
    assert lost.line.startswith(
        "rank 1 exited with status 0 in the middle of its loop, at step 8 (to end a run early, call"
    )
    policy = RestartPolicy(3, None)
    assert policy.after(lost, None) is None
    assert policy.after(replace(lost, step=9), None) is None  # another step: another error
    verdict, why = policy.after(lost, None) or ("", "")
    assert (verdict, "it came again at step 8" in why) == ("script-error", True)


@given(causes, st.lists(consequences, max_size=7), st.data())
def test_a_worker_with_a_cause_of_its_own_is_the_first_failure(cause, others, data) -> None:  # type: ignore[no-untyped-def]
    rank = data.draw(st.integers(0, len(others)))
    kind, status, raised = cause
    exits = [WorkerExit(rank=0, local_rank=0, exit=exit, raised=what) for exit, what in others]
    exits.insert(
        rank, WorkerExit(rank=0, local_rank=0, exit=status, hung="did nothing" if kind == "hang" else "", raised=raised)
    )
    exits = [
        WorkerExit(rank=i + 4, local_rank=i, exit=worker.exit, hung=worker.hung, raised=worker.raised)
        for i, worker in enumerate(exits)
    ]
    failure = first_failure(exits)
    assert (failure.kind, failure.rank, failure.local_rank) == (kind, rank + 4, rank)
    assert (failure.signal is not None) == (status is not None and status < 0)


@given(st.lists(st.floats(0, 9), min_size=1, max_size=6))
def test_of_workers_that_raised_the_earliest_is_the_first_failure(times: list[float]) -> None:
    exits = [WorkerExit(rank=i, local_rank=i, exit=1, raised=own("KeyError: 0", time)) for i, time in enumerate(times)]
    assert times[first_failure(exits).rank] == min(times)


@given(st.lists(consequences, min_size=1, max_size=6))
def test_if_all_workers_only_lost_a_peer_the_script_is_not_blamed(others) -> None:  # type: ignore[no-untyped-def]
    exits = [WorkerExit(rank=i, local_rank=i, exit=exit, raised=what) for i, (exit, what) in enumerate(others)]
    assert first_failure(exits).kind in ("peer", "signal")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (CONNECTION_ERRORS[0], "connection closed"),
        (CONNECTION_ERRORS[1], "connection reset"),
        (CONNECTION_ERRORS[3], "timed out waiting"),
        ("DistBackendError: NCCL error: ncclRemoteError", "ncclRemoteError"),
    ],
)
def test_a_lost_peer_is_told_in_a_few_words_without_the_path_of_a_build_machine(error: str, words: str) -> None:
    raised = RaisedException(error, "Traceback ...", 1.0)
    lost = first_failure([WorkerExit(rank=0, local_rank=0, exit=1, raised=raised)])
    assert lost.line == f"rank 0 lost a peer: {words}"
    assert lost.traceback == "Traceback ..."


TIMEOUT = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:133] Timed out waiting 10000ms for recv operation"


@given(st.permutations([0, 1, 2]), st.booleans())
def test_the_worker_that_others_waited_for_is_blamed(ranks: list[int], aborted: bool) -> None:
    late, *others = ranks
    gave_up = (-signal.SIGABRT, None) if aborted else (1, own(TIMEOUT, 1.0))
    exits = [WorkerExit(rank=late, local_rank=late, exit=None, place=(7, 3), idle=9.0, log="logs/a.err")]
    exits += [
        WorkerExit(rank=rank, local_rank=rank, exit=gave_up[0], raised=gave_up[1], place=(7, 4)) for rank in others
    ]
    failure = first_failure(exits)
    assert (failure.kind, failure.rank) == ("hang", late)
    assert "the stacks of its threads are in logs/a.err" in failure.message
    level = first_failure([replace(worker, place=(7, 3)) for worker in exits])
    assert level.kind in ("peer", "signal")  # it is unknown which one waited
    broken = first_failure(
        [replace(worker, raised=own(CONNECTION_ERRORS[0], 1.0)) if worker.exit else worker for worker in exits]
    )
    assert broken.kind == "peer"  # a connection broke, by a worker elsewhere


def test_survivors_that_cannot_continue_are_not_blamed_on_the_script() -> None:
    raised = RaisedException("rank 0 is lost, and its buffers with it", "", 1.0, origin="peer", place="live.py:1")
    lost = first_failure([WorkerExit(rank=1, local_rank=1, exit=1, raised=raised, step=12)])
    assert (lost.kind, lost.line) == ("peer", "rank 1 cannot continue: rank 0 is lost, and its buffers with it")
    policy = RestartPolicy(3, None)
    assert [policy.after(lost, None) for _ in range(3)] == [None] * 3


def test_a_verdict_is_one_line_and_an_exit_code() -> None:
    verdict = RunVerdict(verdict="completed", attempts=1, because="all workers have finished")
    assert verdict.line == "completed after 1 attempt: all workers have finished"
    assert [
        RunVerdict(verdict=word, attempts=2, because="").exit_code for word in ("gave-up", "preempted", "refused")
    ] == [1, 75, 2]  # type: ignore[arg-type]


def test_a_verdict_is_the_same_on_the_nodes_that_read_it() -> None:
    verdict = RunVerdict(verdict="gave-up", attempts=4, because='rank 2 raised "no"')
    assert RunVerdict.from_text(verdict.to_text()) == verdict


def test_the_verdict_on_a_finished_run_says_if_its_last_snapshot_is_gone() -> None:
    end = Finish(step=40, stopped=False, attempt=3)
    whole, older, none = (done_before(end, newest) for newest in (40, 30, None))
    assert {verdict.verdict for verdict in (whole, older, none)} == {"completed"}
    assert {verdict.attempts for verdict in (whole, older, none)} == {3}
    assert whole.because == (
        "this run is done, trained to its end, step 40: nothing was started (--extend trains it for longer)"
    )
    assert older.because == f"{whole.because}; its last snapshot is gone, the newest that is left is of step 30"
    assert none.because == f"{whole.because}; its last snapshot is gone, none is left"
