"""A limit of the bandwidth: no faster than it allows, no slower than it demands, and gone when the run ends."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.bandwidth import SLICE, BandwidthLimit, TokenBucket
from holdfast.checkpoint.digest import unwatched

MB = 1_000_000


class Clock:
    """A clock that only sleeping and working advance."""

    def __init__(self) -> None:
        self.now, self.longest = 100.0, 0.0

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.longest = max(self.longest, seconds)


def limit(clock: Clock, rate: float, is_over: list[bool] | None = None) -> BandwidthLimit:
    return BandwidthLimit(rate, lambda: bool(is_over), clock=clock.read, sleep=clock.sleep)


def test_a_bucket_lets_the_bytes_of_a_second_pass_at_once_and_then_makes_a_debt() -> None:
    bucket = TokenBucket(rate=100, now=0.0)
    assert bucket.take(100, 0.0) == 0.0
    assert bucket.take(50, 0.0) == 0.5
    assert bucket.take(50, 0.5) == 0.5
    assert bucket.take(150, 60.0) == 0.5  # a long pause earns no more than one second


@given(
    rate=st.integers(10**6, 10**9),
    writes=st.lists(st.tuples(st.integers(0, 16 << 20), st.floats(0, 3)), min_size=1, max_size=30),
)
def test_no_more_than_the_limit_passes_in_any_period(rate: int, writes: list[tuple[int, float]]) -> None:
    clock, ends = Clock(), list[tuple[float, int]]()
    passed = limit(clock, rate).limiting(unwatched)
    for count, seconds in writes:
        clock.now += seconds  # the storage takes its time
        begun = clock.now
        passed(count)
        ends.append((begun, count))
    for first in range(len(ends)):
        for last in range(first, len(ends)):
            before = sum(count for _, count in ends[first:last])  # written by the time that the last piece began
            assert before <= rate * (ends[last][0] - ends[first][0] + 1) * (1 + 1e-6) + 1


def test_a_large_save_takes_as_long_as_its_bytes_need() -> None:
    clock = Clock()
    passed = limit(clock, 200 * MB).limiting(unwatched)
    for _ in range(1000):
        passed(16 << 20)
    assert abs(clock.now - 100.0 - (1000 * (16 << 20) / (200 * MB) - 1)) < 1e-3


def test_a_slow_save_reports_its_progress_all_the_time() -> None:
    clock, reported = Clock(), list[int]()
    limit(clock, 1000).limiting(reported.append)(16 << 10)
    assert sum(reported) == 16 << 10
    assert clock.longest <= SLICE * 1.01


def test_a_storage_that_is_slower_than_the_limit_never_waits() -> None:
    clock = Clock()
    passed = limit(clock, 10 * MB).limiting(unwatched)
    for _ in range(100):
        clock.now += 1.0
        passed(5 * MB)
    assert clock.longest == 0.0


def test_a_lifted_limit_lets_everything_pass() -> None:
    clock = Clock()
    lifted = limit(clock, 1000)
    lifted.lift()
    lifted.limiting(unwatched)(10 * MB)
    limit(clock, 1000, [True]).limiting(unwatched)(10 * MB)
    assert clock.now == 100.0


def test_a_save_that_waits_goes_on_once_the_limit_is_over() -> None:
    clock, is_over = Clock(), list[bool]()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.now > 110:
            is_over.append(True)

    BandwidthLimit(1000, lambda: bool(is_over), clock=clock.read, sleep=sleep).limiting(unwatched)(10 * MB)
    assert 110 < clock.now < 110 + 2 * SLICE
