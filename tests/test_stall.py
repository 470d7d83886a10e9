"""The parts of a stall add up, and time that no part explains is shown."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import BadInput
from holdfast.stall import Stall

seconds = st.floats(0, 1e6)


def test_what_no_part_of_a_stall_explains_is_shown() -> None:
    stall = Stall(waited=2.0, snapshot=0.5, enqueue=0.1, backpressure=0.2, write=0.7, sync=0.3)
    assert stall.unaccounted == pytest.approx(0.2)


def test_parts_that_exceed_the_stall_show_as_negative_not_as_zero() -> None:
    assert Stall(waited=1.0, snapshot=0.8, sync=0.5).unaccounted == pytest.approx(-0.3)


def test_writing_that_overlaps_training_is_no_part_of_the_stall() -> None:
    assert Stall(waited=0.5, snapshot=0.5, overlapped=30.0).unaccounted == 0


@given(st.lists(st.builds(Stall, waited=seconds, snapshot=seconds, write=seconds, overlapped=seconds)))
def test_the_stalls_of_saves_add_up_part_by_part(stalls: list[Stall]) -> None:
    total = sum(stalls, Stall())
    assert total.waited == pytest.approx(sum(stall.waited for stall in stalls))
    assert total.overlapped == pytest.approx(sum(stall.overlapped for stall in stalls))
    assert total.unaccounted == pytest.approx(sum(stall.unaccounted for stall in stalls), abs=1e-3)


@pytest.mark.parametrize(("part", "value"), [("waited", -1.0), ("sync", math.nan)])
def test_impossible_times_are_refused_in_one_line(part: str, value: float) -> None:
    with pytest.raises(BadInput, match=f"the {part} time of a stall must be finite and 0 or more") as refusal:
        Stall(**{part: value})
    assert "\n" not in str(refusal.value)
