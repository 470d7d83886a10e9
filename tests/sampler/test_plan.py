"""Geometry: every window from its position alone, the same for any number of workers."""

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import BadInput
from holdfast.sampler import shuffle
from holdfast.sampler.digest import Samples
from holdfast.sampler.plan import Position, SamplePlan

HUGE = SamplePlan(samples=10**9, batch=256, epochs=3, seed=5)


@st.composite
def geometries(draw: st.DrawFn, samples: int = 300) -> SamplePlan:
    count = draw(st.integers(1, samples))
    batch = draw(st.integers(1, min(count, 200)))
    return SamplePlan(samples=count, batch=batch, epochs=draw(st.integers(1, 4)), seed=draw(st.integers(0, 2**64 - 1)))


class TestPosition:
    def test_positions_are_ordered_by_epoch_and_then_by_cursor(self) -> None:
        assert Position() < Position(0, 1) < Position(1, 0) < Position(1, 1)
        assert str(Position(1, 3)) == "epoch 1 cursor 3"

    @given(geometries(10**9), st.data())
    def test_step_and_position_are_inverse(self, geometry: SamplePlan, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, geometry.steps))
        assert geometry.step(geometry.position(number)) == number

    @given(geometries())
    def test_positions_advance_by_one_window_from_the_start_to_the_end(self, geometry: SamplePlan) -> None:
        places = [geometry.position(step) for step in range(geometry.steps + 1)]
        assert places[0] == Position()
        assert places[-1] == Position(geometry.epochs, 0)
        assert places == sorted(set(places))
        assert all(place.cursor < geometry.steps_per_epoch for place in places)

    @pytest.mark.parametrize("step", [-1, 13])
    def test_a_step_outside_is_refused(self, step: int) -> None:
        with pytest.raises(BadInput, match=rf"Step {step} is not in 0\.\.12"):
            SamplePlan(samples=40, batch=10, epochs=3).position(step)

    @pytest.mark.parametrize("at", [Position(0, 4), Position(0, -1), Position(-1, 0), Position(3, 1), Position(4, 0)])
    def test_a_position_outside_is_refused(self, at: Position) -> None:
        geometry = SamplePlan(samples=40, batch=10, epochs=3)
        with pytest.raises(BadInput, match=f"{at} is not in this training of 12 steps, 4 in an epoch"):
            geometry.step(at)
        with pytest.raises(BadInput, match=f"{at} is not in this training"):
            geometry.window(at)

    def test_there_is_no_window_at_the_end(self) -> None:
        geometry = SamplePlan(samples=40, batch=10, epochs=3)
        with pytest.raises(BadInput, match=r"Steps 12 to 12 are not all in 0\.\.11"):
            geometry.window(geometry.position(geometry.steps))


class TestWindow:
    @given(geometries())
    def test_an_epoch_trains_no_sample_twice_and_leaves_out_less_than_a_window(self, geometry: SamplePlan) -> None:
        for epoch in range(geometry.epochs):
            ids = np.concatenate([geometry.window(Position(epoch, c)) for c in range(geometry.steps_per_epoch)])
            assert len(np.unique(ids)) == len(ids) > geometry.samples - geometry.batch
            assert 0 <= ids.min() <= ids.max() < geometry.samples

    def test_windows_of_a_huge_epoch_have_no_sample_in_common(self) -> None:
        cursors = np.random.default_rng(1).choice(HUGE.steps_per_epoch, 200, replace=False)
        ids = np.concatenate([HUGE.window(Position(1, int(cursor))) for cursor in cursors])
        assert len(np.unique(ids)) == len(ids) == 200 * HUGE.batch
        assert 0 <= ids.min() <= ids.max() < HUGE.samples

    def test_every_epoch_and_every_seed_has_its_own_order(self) -> None:
        orders = {
            tuple(SamplePlan(samples=1000, batch=100, epochs=50, seed=seed).window(Position(epoch, 0)))
            for seed in range(20)
            for epoch in range(50)
        }
        assert len(orders) == 1000

    def test_samples_left_out_of_an_epoch_are_trained_in_others(self) -> None:
        geometry = SamplePlan(samples=19, batch=10, epochs=12)
        assert set(geometry.windows(range(geometry.steps)).ravel().tolist()) == set(range(19))

    @given(geometries(), st.data())
    def test_windows_computed_together_equal_those_computed_alone(
        self, geometry: SamplePlan, data: st.DataObject
    ) -> None:
        steps = data.draw(st.lists(st.integers(0, geometry.steps - 1), max_size=20))
        rows = geometry.windows(steps)
        assert rows.shape == (len(steps), geometry.batch)
        assert rows.dtype == np.int64
        for row, step in zip(rows, steps, strict=True):
            assert np.array_equal(row, geometry.window(geometry.position(step)))

    def test_known_windows_never_change(self) -> None:
        geometry = SamplePlan(samples=100, batch=5, epochs=2, seed=1)
        assert geometry.window(Position(0, 0)).tolist() == [41, 65, 22, 26, 86]
        assert geometry.window(Position(1, 19)).tolist() == [12, 42, 23, 30, 65]

    @pytest.mark.parametrize("steps", [[-1, 2], [0, 12]])
    def test_windows_outside_are_refused(self, steps: list[int]) -> None:
        with pytest.raises(BadInput, match=rf"Steps {steps[0]} to {steps[1]} are not all in 0\.\.11"):
            SamplePlan(samples=40, batch=10, epochs=3).windows(steps)


class TestShare:
    @given(geometries(), st.data())
    def test_the_shares_of_any_two_worlds_have_the_same_union_step_by_step(
        self, geometry: SamplePlan, data: st.DataObject
    ) -> None:
        one, other = (data.draw(st.integers(1, min(geometry.batch, 9))) for _ in range(2))
        for step in range(min(geometry.steps, 20)):
            at = geometry.position(step)
            unions = [[geometry.share(at, rank, world) for rank in range(world)] for world in (one, other)]
            assert np.array_equal(np.concatenate(unions[0]), np.concatenate(unions[1]))
            assert np.array_equal(np.concatenate(unions[0]), geometry.window(at))
            digests = [sum(map(Samples.of, shares), Samples()) for shares in unions]
            assert digests == [Samples.of(geometry.window(at))] * 2

    @given(geometries(), st.data())
    def test_shares_differ_by_at_most_one_sample(self, geometry: SamplePlan, data: st.DataObject) -> None:
        world = data.draw(st.integers(1, geometry.batch))
        sizes = [geometry.share_size(rank, world) for rank in range(world)]
        assert sum(sizes) == geometry.batch
        assert max(sizes) - min(sizes) <= 1
        at = geometry.position(geometry.steps - 1)
        assert len(geometry.share(at, world - 1, world)) == sizes[-1]

    @pytest.mark.parametrize("world", [0, -1, 11])
    def test_a_world_that_cannot_be_formed_is_refused(self, world: int) -> None:
        with pytest.raises(BadInput, match=f"A global batch of 10 samples cannot be divided among {world} workers"):
            SamplePlan(samples=40, batch=10, epochs=3).share(Position(), 0, world)

    @pytest.mark.parametrize("rank", [-1, 4])
    def test_a_rank_outside_the_world_is_refused(self, rank: int) -> None:
        with pytest.raises(BadInput, match=f"no rank {rank} among 4 workers"):
            SamplePlan(samples=40, batch=10, epochs=3).share_size(rank, 4)


class TestWork:
    """To go on anywhere costs the window: counted, because clocks prove nothing."""

    @pytest.mark.parametrize("samples", [10**8, 10**9])
    @pytest.mark.parametrize("where", ["first", "last"])
    def test_a_window_costs_the_same_anywhere(self, samples: int, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
        through, passed = shuffle._through, []

        def counting(x: np.ndarray, *others: object) -> np.ndarray:
            passed.append(x.size)
            return through(x, *others)  # type: ignore[arg-type]

        monkeypatch.setattr(shuffle, "_through", counting)
        geometry = SamplePlan(samples=samples, batch=256, epochs=2)
        geometry.window(geometry.position(0 if where == "first" else geometry.steps_per_epoch - 1))
        assert geometry.batch <= sum(passed) <= geometry.batch + 5

    def test_a_share_costs_only_the_share(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[int] = []
        monkeypatch.setattr("holdfast.sampler.plan.permuted", lambda places, *_: asked.append(places.size) or places)
        HUGE.share(Position(2, 10**6), 3, 4)
        assert asked == [64]

    def test_the_last_window_of_a_huge_epoch_takes_no_memory_for_the_others(self) -> None:
        at = HUGE.position(HUGE.steps_per_epoch - 1)
        HUGE.window(at)  # what numpy loads once is not counted
        tracemalloc.start()
        try:
            SamplePlan.from_json(HUGE.to_json()).window(at)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 64 * 8 * HUGE.batch


class TestJson:
    @given(geometries(10**9))
    def test_a_plan_survives_json(self, geometry: SamplePlan) -> None:
        assert SamplePlan.from_json(json.loads(json.dumps(geometry.to_json()))) == geometry

    def test_other_fields_in_json_are_ignored(self) -> None:
        assert SamplePlan.from_json({**HUGE.to_json(), "writer": "overlapped"}) == HUGE

    @pytest.mark.parametrize("value", [None, 7, "plan", [], {"samples": 10}])
    def test_json_that_is_not_a_plan_is_refused(self, value: object) -> None:
        with pytest.raises(BadInput, match="Not the plan of a training"):
            SamplePlan.from_json(value)

    def test_missing_fields_are_named(self) -> None:
        with pytest.raises(BadInput, match="lacks epochs, seed"):
            SamplePlan.from_json({"samples": 10, "batch": 5})

    @pytest.mark.parametrize("value", ["5", 5.0, True, None, [5]])
    @pytest.mark.parametrize("field", ["samples", "batch", "epochs", "seed"])
    def test_fields_that_are_not_integers_are_named(self, field: str, value: object) -> None:
        with pytest.raises(BadInput, match=f"^{field} must be an integer"):
            SamplePlan.from_json({**HUGE.to_json(), field: value})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch": 0}, r"global_batch must be at least 1 \(got 0\)"),
        ({"samples": 9}, "9 samples do not fill one global batch of 10"),
        ({"samples": 10**15}, "1000000000000000 samples are more than can be shuffled"),
        ({"epochs": 0}, "The number of epochs must be at least 1"),
        ({"seed": -1}, "The seed -1 does not fit 64 bits"),
        ({"seed": 2**64}, "does not fit 64 bits"),
    ],
)
def test_a_plan_that_cannot_be_trained_is_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        SamplePlan(**{"samples": 100, "batch": 10, "epochs": 1, **wrong})
