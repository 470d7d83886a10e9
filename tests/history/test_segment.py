"""Segments: every line of a history comes back byte for byte, and damage is one line."""

import io
import random
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fake_runs import random_run
from holdfast.errors import Corrupt, FutureVersion
from holdfast.events import Open, Other, Plan, Seconds, Step, What, line
from holdfast.history.segment import FilePart, HistorySegment, _array_in, encode
from holdfast.sampler.digest import Samples
from holdfast.sampler.plan import SamplePlan

PLAN = SamplePlan(samples=1000, batch=8, epochs=10, seed=7)
HOW = Plan(1, PLAN.samples, PLAN.batch, PLAN.epochs, PLAN.seed, 50, "overlapped", "c")
SOME = st.one_of(st.none(), st.floats(0, 10, width=32), st.floats(0, 10))


def trained(step: int, rank: int = 0, world: int = 2, **fields: object) -> Step:
    samples = Samples.of(PLAN.share(PLAN.position(step), rank, world))
    share = Step(1, world, rank, *PLAN.position(step), step, samples, Seconds(0.000125, 0.002, 0.0), "ab" * 16)
    return share._replace(reduced=1, stepped=1, **fields)  # type: ignore[arg-type]


def part(who: str, whats: Sequence[What], time: float = 1.7e9) -> FilePart:
    return FilePart(who, 0, 1, b"".join(line(time + i / 1000, who, what) for i, what in enumerate(whats)))


def segment(folder: Path, parts: Sequence[FilePart]) -> HistorySegment:
    path = folder / "000001.npz"
    path.write_bytes(encode(parts))
    return HistorySegment(path)


def come_back(folder: Path, parts: Sequence[FilePart]) -> HistorySegment:
    opened = segment(folder, parts)
    for before, folded in zip(parts, opened.parts, strict=True):
        assert b"".join(opened.lines(folded)) == before.data
        assert (folded.start, folded.end, folded.line) == (before.start, before.start + len(before.data), before.line)
    return opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("segments")


@given(seed=st.integers(0, 2**32))
@settings(max_examples=settings.default.max_examples // 2)
def test_the_lines_of_any_run_come_back(folder: Path, seed: int) -> None:
    run = random_run(random.Random(seed))
    parts = [
        FilePart(who, 0, 1, b"".join(line(*event) for event in events))
        for who, events in run.files.items()
        if who.startswith("rank-")
    ]
    come_back(folder, parts)


@given(
    numbers=st.lists(st.integers(0, 40), max_size=20),
    times=st.lists(st.floats(0, 1e11), min_size=1, max_size=5),
    losses=st.lists(SOME, min_size=1, max_size=5),
    states=st.lists(st.sampled_from([None, "cd" * 16, "short", "é", "AB" * 16]), min_size=1, max_size=5),
    device=st.booleans(),
    noise=st.lists(st.sampled_from([b"\n", b"{}\n", b'{"event": "step"}\n', b"\xff\r\n"]), max_size=3),
)
@example([3, 3, 2], [0.0], [None], [None], True, [])
def test_unusual_steps_come_back(
    folder: Path,
    numbers: list[int],
    times: list[float],
    losses: list[float | None],
    states: list[str | None],
    device: bool,
    noise: list[bytes],
) -> None:
    lines = [line(0.0, "rank-0", Open(2)), line(0.0, "rank-0", HOW)]
    for i, number in enumerate(numbers):
        seconds = Seconds(times[i % len(times)], 0.25, 0.0, device)
        step = trained(number, seconds=seconds, state=states[i % len(states)], loss=losses[i % len(losses)])
        lines.append(line(times[i % len(times)], "rank-0", step))
        lines += noise[i : i + 1]
    come_back(folder, [FilePart("rank-0", 77, 5, b"".join(lines))])


def test_steps_of_the_plan_are_stored_without_their_sample_digests(tmp_path: Path) -> None:
    opened = come_back(
        tmp_path, [part(f"rank-{rank}", [HOW, *(trained(n, rank) for n in range(600))]) for rank in (0, 1)]
    )
    (panel,) = opened.panels
    assert list(panel.planned) == [True, True]
    assert "digest_high" not in panel.columns


def test_a_step_with_other_samples_than_planned_keeps_its_digests(tmp_path: Path) -> None:
    steps = [trained(number, 0) for number in range(300)]
    steps[256] = steps[256]._replace(samples=Samples.of([1, 2, 3, 4]))
    opened = come_back(
        tmp_path, [part("rank-0", [HOW, *steps]), part("rank-1", [HOW, *(trained(n, 1) for n in range(300))])]
    )
    assert list(opened.panels[0].planned) == [False, True]


def test_samples_of_another_plan_do_not_come_back(tmp_path: Path) -> None:
    opened = segment(tmp_path, [part("rank-0", [HOW, *(trained(n) for n in range(20))])])
    (panel,) = opened.panels
    assert panel.phase is not None
    object.__setattr__(panel, "phase", panel.phase._replace(seed=8))
    with pytest.raises(Corrupt, match="not those it recorded"):
        list(opened.lines(opened.parts[0]))


def test_a_long_run_takes_few_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    parts = []
    for rank in range(2):
        steps, losses = range(1200), rng.random(1200).astype(np.float32)
        durations = np.round(0.002 + rng.random(1200) * 0.0002, 6)
        states = [f"{word:016x}{'0' * 16}" for word in np.random.default_rng(6).integers(0, 1 << 62, 1200)]
        rows = [
            trained(n, rank, seconds=Seconds(0.00015, float(durations[n]), 0.0), state=states[n], loss=float(losses[n]))
            for n in steps
        ]
        parts.append(part(f"rank-{rank}", [HOW, *rows]))
    come_back(tmp_path, parts)
    size = (tmp_path / "000001.npz").stat().st_size
    assert size / 2400 < 14  # 4 of a fingerprint, 4 of a loss, 2 of times; the rest is the archive


def test_numpy_reads_a_segment(tmp_path: Path) -> None:
    opened = segment(tmp_path, [part("rank-0", [HOW, *(trained(n, loss=n**3 / 8) for n in range(20))])])
    with np.load(opened.path) as archive:
        assert archive["0/loss"].dtype == np.uint8


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0), (3, 100_000), (2, 3, 4)])
def test_the_arrays_of_a_segment_are_those_that_numpy_reads(dtype: type[np.generic], shape: tuple[int, ...]) -> None:
    written, file = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape), io.BytesIO()
    np.lib.format.write_array(file, written, allow_pickle=False)
    read = _array_in(file.getvalue())
    assert (read.dtype, read.shape) == (written.dtype, written.shape)
    assert np.array_equal(read, written)
    if written.size:
        with pytest.raises(ValueError, match=r"size|reshape|read"):
            _array_in(file.getvalue()[:-1])


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = segment(tmp_path, [part("rank-0", [HOW, *(trained(n) for n in range(20))])]).path
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(Corrupt, match="not a segment of a history as it was written") as error:
            HistorySegment(path)
        assert "\n" not in str(error.value)


def test_a_column_that_is_damaged_after_the_segment_was_opened_is_noticed(tmp_path: Path) -> None:
    opened = segment(tmp_path, [part("rank-0", [HOW, *(trained(n, loss=n**0.5 / 7) for n in range(300))])])
    with zipfile.ZipFile(opened.path) as archive:
        column = archive.getinfo("0/loss.npy")
    data = bytearray(opened.path.read_bytes())
    data[column.header_offset + column.compress_size // 2] ^= 1
    opened.path.write_bytes(data)
    with pytest.raises(Corrupt, match="not a segment of a history as it was written"):
        b"".join(opened.lines(opened.parts[0]))


@pytest.mark.parametrize("data", [b"", b"x" * 500, b"PK\x05\x06" + bytes(18)])
def test_what_is_no_segment_is_one_line(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(Corrupt, match="not a segment of a history"):
        HistorySegment(tmp_path / "x.npz")


def test_a_segment_of_a_later_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.history.segment.FORMAT", 2)
    data = encode([part("rank-0", [Other("eclipse", {})])])
    monkeypatch.undo()
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(FutureVersion, match="upgrade holdfast"):
        HistorySegment(tmp_path / "x.npz")


def test_an_archive_with_a_column_that_is_not_described_is_damage(tmp_path: Path) -> None:
    opened = segment(tmp_path, [part("rank-0", [HOW, *(trained(n, loss=n / 3) for n in range(20))])])
    with zipfile.ZipFile(opened.path, "w") as archive:  # replaced while it is open
        archive.writestr("header.json", "{}")
    with pytest.raises(Corrupt, match="restore the file"):
        list(opened.lines(opened.parts[0]))
