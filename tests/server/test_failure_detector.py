"""The failure detector finds exactly the members that are silent for too long."""

from holdfast.server.failure_detector import FailureDetector


def detector() -> FailureDetector[str]:
    found: FailureDetector[str] = FailureDetector(interval=0.25, deadline=1.25, at_first=30.0)
    for member in ("a", "b"):
        found.watch(member, 0.0)
        found.settle(member)
    return found


def test_a_member_is_asked_again_some_time_after_it_answered() -> None:
    members = detector()
    assert members.due(0.2) == []
    assert members.due(0.25) == ["a", "b"]
    members.asked("a", 0.25)
    assert members.due(5.0) == ["b"]
    members.heard("a", 0.3)
    assert "a" not in members.due(0.5)
    assert "a" in members.due(0.6)


def test_a_member_that_misses_the_deadline_is_silent() -> None:
    members = detector()
    for member in ("a", "b"):
        members.asked(member, 0.25)
    members.heard("b", 0.3)
    late = [members.silent(0.25 + tick / 10) for tick in range(15)]
    assert not any(late[:13])
    assert late[13] == {"a": "it did not answer within 1.25 s"}


def test_a_member_may_be_slow_until_it_has_done_each_task_once() -> None:
    members: FailureDetector[str] = FailureDetector()
    members.watch("a", 0.0)
    members.asked("a", 0.25)
    times = [tick / 10 for tick in range(320)]
    assert [members.silent(now) != {} for now in times].index(True) == 303


def test_time_in_which_the_detector_was_not_run_does_not_count() -> None:
    members = detector()
    members.silent(0.2)
    members.asked("a", 0.25)
    assert members.silent(60.0) == {}
    assert members.silent(60.25) == {}
    assert "a" in [member for tick in range(12) for member in members.silent(60.5 + tick / 10)]


def test_a_forgotten_member_is_neither_asked_nor_silent() -> None:
    members = detector()
    members.asked("a", 0.25)
    members.forget("a")
    members.heard("a", 0.5)
    assert members.due(9.0) == ["b"]
    assert members.silent(0.3) == {}
