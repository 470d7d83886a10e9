"""The casualty is whoever failed of its own accord; whoever only lost it as a peer is not."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.supervise.casualty import Casualty, Death, casualty
from holdfast.supervise.errorfile import Raised
from holdfast.supervise.verdict import Verdict, stop

# What peers of a dead worker were seen to raise.
CONNECTION_ERRORS = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:17313",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:525] Read error [127.0.0.1]:1: Connection reset by peer",
    "RuntimeError: Application timeout caused pair closure",
    "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:133] Timed out waiting 10000ms for recv operation to complete",
    "DistBackendError: NCCL error: remote process exited or there was a network error",
    "DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed.",
    "RuntimeError: Broken pipe",
)
peer_error = st.builds(Raised, st.sampled_from(CONNECTION_ERRORS), st.just("Traceback ..."), st.floats(0, 9))
consequences = st.one_of(
    st.tuples(st.none(), st.none()),  # it still runs
    st.tuples(st.sampled_from([1, None]), peer_error),
    st.tuples(st.just(-signal.SIGABRT), st.none()),  # C++ met the lost connection where nobody caught it
)


def own(message: str, time: float) -> Raised:
    return Raised(message, f"Traceback ...\n{message}", time)


causes = st.one_of(
    st.tuples(st.just("signal"), st.sampled_from([-signal.SIGKILL, -signal.SIGSEGV]), st.none()),
    st.tuples(st.just("exit"), st.sampled_from([1, 3, 137]), st.none()),
    st.tuples(st.just("error"), st.sampled_from([1, None]), st.builds(own, st.just("ValueError: no"), st.floats(0, 9))),
    st.tuples(st.just("hang"), st.just(-signal.SIGKILL), st.none()),
)


@given(causes, st.lists(consequences, max_size=7), st.data())
def test_whoever_has_a_cause_of_its_own_is_the_casualty(cause, others, data) -> None:  # type: ignore[no-untyped-def]
    rank = data.draw(st.integers(0, len(others)))
    kind, status, raised = cause
    deaths = [Death(rank=0, local_rank=0, exit=exit, raised=what) for exit, what in others]
    deaths.insert(rank, Death(rank=0, local_rank=0, exit=status, hung=kind == "hang", raised=raised))
    deaths = [
        Death(rank=i + 4, local_rank=i, exit=each.exit, hung=each.hung, raised=each.raised)
        for i, each in enumerate(deaths)
    ]
    found = casualty(deaths)
    assert (found.kind, found.rank, found.local_rank) == (kind, rank + 4, rank)
    assert (found.signal is not None) == (status is not None and status < 0)


@given(st.lists(st.floats(0, 9), min_size=1, max_size=6))
def test_of_several_that_raised_the_first_is_the_casualty(times: list[float]) -> None:
    deaths = [Death(rank=i, local_rank=i, exit=1, raised=own("KeyError: 0", time)) for i, time in enumerate(times)]
    assert times[casualty(deaths).rank] == min(times)


@given(st.lists(consequences, min_size=1, max_size=6))
def test_where_all_have_only_lost_a_peer_nobody_blames_the_script(others) -> None:  # type: ignore[no-untyped-def]
    deaths = [Death(rank=i, local_rank=i, exit=exit, raised=what) for i, (exit, what) in enumerate(others)]
    assert not casualty(deaths).is_of_the_script


def lost(kind: str = "signal", traceback: str = "") -> Casualty:
    return Casualty(kind=kind, rank=2, local_rank=2, exit=1, signal=None, message="broke", traceback=traceback)  # type: ignore[arg-type]


@given(st.integers(0, 9), st.integers(0, 9), st.booleans(), st.sampled_from(["exit", "signal", "hang", "peer"]))
def test_a_failure_is_tried_again_until_the_limit(restarts: int, limit: int, progress: bool, kind: str) -> None:
    why = stop(lost(kind), restarts=restarts, max_restarts=limit, progress=progress)
    assert (why[0] if why else None) == ("gave-up" if restarts >= limit else None)


@pytest.mark.parametrize(
    ("restarts", "progress", "word"), [(0, False, "script-error"), (0, True, None), (3, True, "gave-up")]
)
def test_a_script_that_raises_is_tried_again_only_if_it_got_further(
    restarts: int, progress: bool, word: str | None
) -> None:
    why = stop(lost("error", "Traceback"), restarts=restarts, max_restarts=3, progress=progress)
    assert (why[0] if why else None) == word


def test_a_verdict_is_one_line_and_an_exit_code() -> None:
    verdict = Verdict(verdict="completed", attempts=1, because="all workers have finished")
    assert verdict.line == "completed after 1 attempt: all workers have finished"
    assert [Verdict(verdict=word, attempts=2, because="").exit_code for word in ("gave-up", "preempted")] == [1, 75]  # type: ignore[arg-type]
