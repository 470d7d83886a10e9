"""A store from a stranger, or damaged: nothing hangs, nothing strays outside, no length is believed, all in one line."""

import json
import os
import re
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import xxhash

from holdfast import cli, memory
from holdfast.blocks.division import along
from holdfast.checkpoint import manifest, payload, retention, scrub, snapshot
from holdfast.checkpoint.digest import seal
from holdfast.checkpoint.index import index_name
from holdfast.checkpoint.reader import SnapshotReader
from holdfast.checkpoint.running import RunningCheckpoint
from holdfast.checkpoint.store import SMALL, DirectoryStore
from holdfast.errors import BadInput, Corrupt, HoldfastError, NoSnapshot, StorageFailed
from snapshots import resume, saved, saved_by
from supervisor_process import StartCommand

DEADLINE = 60
STATE = {"w": np.zeros((3, 4))}
BLOCKS = along(STATE, "w")
NEWEST = "step-00000002"
SHARD = "shard-00000-of-00001.safetensors"
HUGE = 20 << 30
ROOM = 256 << 20  # bytes that a process may take to read a store: far less than any of the lengths claimed here


def pipe(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))  # a socket's path must be short


def folder(path: Path) -> None:
    (path / "inside").mkdir(parents=True)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def elsewhere(path: Path) -> None:
    target = path.parent.parent.parent / "elsewhere"
    target.write_text("not of this store")
    path.symlink_to(target)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, HUGE)


THINGS: list[Callable[[Path], None]] = [pipe, listening, folder, endless, elsewhere, sparse]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with good snapshots of steps 1 and 2, a running checkpoint, and nothing else."""
    store = saved(DirectoryStore(tmp_path / "store"), 1, 2)
    RunningCheckpoint.create(store, BLOCKS, STATE)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "store"


class Ran(NamedTuple):
    """The output and the exit status of a command."""

    code: int
    out: bytes
    err: bytes


@pytest.fixture
def holdfast(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Callable[..., Ran]:
    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "400")
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Ran(int(ended.value.code or 0), *capfdbinary.readouterr())

    return run


@pytest.fixture(autouse=True)
def _deadline() -> Iterator[None]:
    """Nothing here may wait: what opens a pipe is woken up, and fails."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(DEADLINE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def one_line(error: pytest.ExceptionInfo[HoldfastError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def sealed_again(place: Path, step: int, /, **changes: Any) -> None:
    """Change fields of a manifest, and seal it again."""
    path = place / f"step-{step:08d}" / "manifest.json"
    record = json.loads(path.read_bytes())
    del record["digest"]
    path.write_bytes(seal({**record, **changes}))


def with_extra(place: Path, step: int, data: bytes) -> None:
    """Replace everything but the tensors, and make the manifest match."""
    (place / f"step-{step:08d}" / "extra.json").write_bytes(data)
    sealed_again(place, step, extra={"length": len(data), "xxh3": xxhash.xxh3_128_hexdigest(data)})


def with_layout(place: Path, step: int, /, **changes: Any) -> None:
    """Change the layout of a snapshot, and make the manifest match."""
    extra = json.loads((place / f"step-{step:08d}" / "extra.json").read_bytes())
    extra["layout"] = {**extra["layout"], **changes}
    with_extra(place, step, json.dumps(extra).encode())


def with_shard(place: Path, step: int, data: bytes, name: str = SHARD) -> None:
    """Replace the file of one rank's tensors, with good digests of its chunks, and make the manifest match."""
    folder = place / f"step-{step:08d}"
    shards = json.loads((folder / "manifest.json").read_bytes())["shards"]
    starts = range(0, len(data), payload.CHUNK)
    table = b"".join(xxhash.xxh3_128_digest(data[start : start + payload.CHUNK]) for start in starts)
    (folder / name).write_bytes(data + table)
    shards[int(name[6:11])] = [len(data) + len(table), xxhash.xxh3_128_hexdigest(table)]
    sealed_again(place, step, shards=shards)


# Things that are no files, and files that are too large.


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("name", ["shard-00000-of-00001.safetensors", "extra.json", "manifest.json"])
def test_whatever_stands_where_a_file_should_the_older_snapshot_is_used(
    place: Path, name: str, thing: Callable[[Path], None]
) -> None:
    (place / NEWEST / name).unlink()
    thing(place / NEWEST / name)
    store = DirectoryStore(place)
    back = snapshot.newest(store)
    assert back.step == 1
    no_manifest = name == "manifest.json" and thing is folder
    assert [passed.name for passed in back.passed_over] == ([] if no_manifest else [f"{NEWEST}/"])
    assert [finding.name for finding in scrub.verify(store)] == ([] if no_manifest else [f"{NEWEST}/manifest.json"])
    scrub.inspect(store)
    saved(store, 3)
    assert snapshot.newest(store).step == 3


@pytest.mark.parametrize("thing", THINGS)
def test_whatever_stands_where_an_index_or_a_segment_should_the_older_generation_is_used(
    place: Path, thing: Callable[[Path], None]
) -> None:
    store = DirectoryStore(place)
    RunningCheckpoint.open(store, BLOCKS).save(1, STATE, np.array([0]))
    newest = place / index_name(1)
    segments = json.loads(newest.read_bytes())["segments"]
    for path in (place / segments[-1]["name"], newest):
        path.unlink()
        thing(path)
        running = RunningCheckpoint.open(store, BLOCKS)
        assert running.saved_at.tolist() == [0] * len(BLOCKS)
        scrub.verify(store)


@pytest.mark.parametrize("thing", [pipe, endless, sparse])
def test_the_commands_answer_whatever_stands_in_a_store(
    place: Path, thing: Callable[[Path], None], holdfast: Callable[..., Ran]
) -> None:
    for name in (
        f"{NEWEST}/manifest.json",
        "step-00000001/shard-00000-of-00001.safetensors",
        "latest.json",
        index_name(0),
    ):
        (place / name).unlink()
        thing(place / name)
    assert holdfast("inspect", place).out.count(b"unreadable: ") == 2
    ran = holdfast("verify", place)
    assert ran.out.count(b"bad: ") == 4
    assert (ran.code, ran.err) == (1, b"")


READ = """
import resource, sys
from pathlib import Path
import torch  # which the tensors of a snapshot need in any case
from holdfast.checkpoint import scrub, snapshot
from holdfast.checkpoint.store import DirectoryStore
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]), used + int(sys.argv[2])))
store = DirectoryStore(sys.argv[1])
print(len(scrub.inspect(store).unreadable), len(scrub.verify(store)), snapshot.newest(store).step)
"""


def test_files_of_20_gb_take_no_memory(start_command: StartCommand, place: Path) -> None:
    saved(DirectoryStore(place), 3, 4)
    for name in (
        "step-00000002/extra.json",
        "step-00000003/shard-00000-of-00001.safetensors",
        "step-00000004/manifest.json",
    ):
        os.truncate(place / name, HUGE)
    os.truncate(place / "latest.json", HUGE)
    reader = start_command(place, ROOM, instead=READ)
    assert reader.wait(DEADLINE) == 0, reader.stderr
    assert reader.stdout == "1 4 1\n"


def test_a_length_that_no_memory_holds_is_refused_before_it_is_taken(place: Path) -> None:
    chunks = 1 << 20
    path = place / NEWEST / SHARD
    good = path.read_bytes()[: -payload.DIGEST_BYTES]  # with one chunk
    first = good + bytes(payload.CHUNK - len(good))
    table = xxhash.xxh3_128_digest(first) + xxhash.xxh3_128_digest(bytes(payload.CHUNK)) * (chunks - 1)
    with path.open("wb") as file:  # a terabyte of zeros, which takes no space
        file.write(first)
        file.seek(chunks * payload.CHUNK)
        file.write(table)
    length = chunks * payload.CHUNK + len(table)
    sealed_again(place, 2, shards=[[length, xxhash.xxh3_128_hexdigest(table)]])
    with pytest.raises(BadInput, match=rf"needs {length} bytes of memory and only \d+ are free") as error:
        snapshot.newest(DirectoryStore(place))
    one_line(error)
    assert 0 < memory.available() < length


def test_a_record_larger_than_any_is_refused_before_it_is_read(place: Path) -> None:
    os.truncate(place / NEWEST / "manifest.json", SMALL + 1)
    with pytest.raises(Corrupt, match=f"{SMALL + 1} bytes, more than") as error:
        manifest.read_manifest(DirectoryStore(place), 2)
    one_line(error)
    sealed_again(place, 1, extra={"length": manifest.EXTRA_LIMIT + 1, "xxh3": "0" * 32})
    with pytest.raises(Corrupt, match="extra of"):
        manifest.read_manifest(DirectoryStore(place), 1)


# Links.


def test_a_linked_step_folder_is_neither_read_nor_written_nor_cleared(place: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (place / NEWEST).rename(outside)
    (outside / "mine.tmp").write_text("precious")
    (place / NEWEST).symlink_to(outside)
    before = {path.name: path.read_bytes() for path in outside.iterdir()}
    store = DirectoryStore(place)

    back = snapshot.newest(store)
    assert back.step == 1
    assert "symbolic link" in back.passed_over[0].why
    assert [finding.name for finding in scrub.verify(store)] == [NEWEST]
    with pytest.raises(StorageFailed, match="symbolic link") as error:
        snapshot.save(store, 2, {"w": np.zeros(3)}, {})
    one_line(error)
    with pytest.raises(StorageFailed, match="symbolic link"):
        manifest.remove(store, 2)
    retention.tidy(store, 1)
    retention.keep_last(store, 1)
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == before

    found, passed_over = resume(store)  # the link itself goes out of the way
    assert found is not None
    assert found.step == 1
    assert len(passed_over) == 1
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == before
    saved(store, 2)
    assert snapshot.newest(store).step == 2
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == before


def test_a_linked_running_folder_is_not_written_through(place: Path, tmp_path: Path) -> None:
    (place / "running").rename(tmp_path / "outside")
    (place / "running").symlink_to(tmp_path / "outside")
    before = sorted(path.name for path in (tmp_path / "outside").iterdir())
    store = DirectoryStore(place)
    with pytest.raises(StorageFailed, match="symbolic link"):
        RunningCheckpoint.create(store, BLOCKS, STATE)
    assert sorted(path.name for path in (tmp_path / "outside").iterdir()) == before
    assert [finding.name for finding in scrub.verify(store)] == ["running"]


def test_the_root_may_be_a_link_since_the_user_named_it(place: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(place)
    store = DirectoryStore(tmp_path / "link")
    assert snapshot.newest(saved(store, 3)).step == 3
    assert scrub.verify(store) == []


# Records that say nonsense.


@pytest.mark.parametrize(
    "changes",
    [
        {"saved": "yesterday"},
        {"saved": 1e300},
        {"saved": -1e300},
        {"saved": 10**400},
        {"saved": True},
        {"saved": None},
        {"step": "2"},
        {"step": True},
        {"step": 2.0},
        {"epoch": -1},
        {"epoch": None},
        {"cursor": [1]},
        {"cursor": 1 << 63},
        {"world": "\x1b[31m"},
        {"config": 7},
        {"shards": []},
        {"shards": 7},
        {"shards": None},
        {"shards": {"\x1b[2J": {"\x1b[2J": 1}}},
        {"shards": ["\x1b[2J"]},
        {"shards": [[-1, "0" * 32]]},
        {"shards": [[True, "0" * 32]]},
        {"shards": [[1 << 63, "0" * 32]]},
        {"shards": [[1, "0" * 31]]},
        {"shards": [[1, "0" * 32, 1]]},
        {"extra": {"length": -1, "xxh3": "0" * 32}},
        {"extra": {"\x1b[2J": {"\x1b[2J": 1}}},
        {"extra": [1, "0" * 32]},
        {"extra": []},
        {"payloads": {}},
        {"\x1b[31mnew\nfield": 1},
        {"format": "\x1b[31m"},
        {"format": 10**400},
    ],
)
def test_a_manifest_that_says_nonsense_is_corrupt_in_one_line(place: Path, changes: dict[str, Any]) -> None:
    sealed_again(place, 2, **changes)
    store = DirectoryStore(place)
    with pytest.raises(Corrupt) as error:
        snapshot.load(store, 2)
    assert one_line(error).isprintable()
    assert snapshot.newest(store).step == 1
    assert [manifest.step for manifest in scrub.inspect(store).snapshots] == [1]


def test_a_manifest_that_says_one_thing_twice_is_corrupt(place: Path) -> None:
    path = place / NEWEST / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'  "step": 2', b'  "step": 2,\n  "step": 2'))
    with pytest.raises(Corrupt, match="does not match its own digest"):
        snapshot.load(DirectoryStore(place), 2)
    assert [finding.name for finding in scrub.verify(DirectoryStore(place))] == [f"{NEWEST}/manifest.json"]


@pytest.mark.parametrize(
    "changes",
    [{"generation": True}, {"blocks": "3"}, {"oldest": -1}, {"newest": None}, {"layout": 3}, {"segments": {}}, {"a": 1}]
    + [{"segments": [entry]} for entry in (1, {}, {"name": "running/segment-0", "length": 1, "xxh3": "0" * 32})],
)
def test_an_index_that_says_nonsense_is_corrupt_in_one_line(place: Path, changes: dict[str, Any]) -> None:
    path = place / index_name(0)
    record = json.loads(path.read_bytes())
    del record["digest"]
    path.write_bytes(seal({**record, **changes}))
    with pytest.raises(Corrupt) as error:
        RunningCheckpoint.open(DirectoryStore(place), BLOCKS)
    assert one_line(error).isprintable()
    assert [finding.name for finding in scrub.verify(DirectoryStore(place))] == [index_name(0)]


@pytest.mark.parametrize(
    "data", [b"[" * 1_000_000, b'{"a":' * 100_000, b"NaN", b"9" * 5000, b"\xff\xfe", b"null", b"[]", b"7", b""]
)
def test_json_that_is_no_record_is_corrupt_wherever_it_stands(place: Path, data: bytes) -> None:
    store = DirectoryStore(place)
    with_extra(place, 2, data)
    with pytest.raises(Corrupt):
        snapshot.load(store, 2)
    with_shard(place, 2, struct.pack("<Q", len(data)) + data)
    (place / "latest.json").write_bytes(data)
    (place / index_name(0)).write_bytes(data)
    assert snapshot.newest(store).step == 1
    assert [finding.name for finding in scrub.verify(store)] == [
        f"{NEWEST}/manifest.json",
        index_name(0),
        "latest.json",
    ]


def test_extra_json_that_holds_no_number_is_corrupt(place: Path) -> None:
    with_extra(place, 2, b'{"lr": NaN}')
    with pytest.raises(Corrupt, match="not JSON"):
        snapshot.load(DirectoryStore(place), 2)


# Small files that would become large states.


def header_of(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def entry(start: Any, end: Any, shape: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "entries",
    [
        {f"w{i}": entry(0, 16, [4]) for i in range(1000)},
        {"a": entry(0, 12, [3]), "b": entry(8, 16, [2])},
        {"a": entry(0, 16, [4]), "b": entry(4, 8, [1])},
        {"a": entry(True, 16, [4])},
        {"a": entry(0.0, 16.0, [4])},
        {"a": entry(0, 16, [4.0])},
        {"a": entry(0, 16, [-2, -2])},
        {"a": entry(0, 16, [True] * 2 + [4])},
        {"a": entry(0, 0, [0, 1 << 62, 1 << 62])},
        {"a": entry(0, 16, [4] + [1] * 100)},
        {"a": entry(16, 0, [-4])},
        {"a": entry(0, 16, [4], "\x1b[31m")},
        {"a": entry(0, 16, [4], [])},
        {"a": entry(0, 1 << 70, [1 << 68])},
        {"a": 7},
        {"__metadata__": 7},
        {"__metadata__": {"numpy": "[[1]]"}},
    ],
)
def test_a_header_whose_values_overlap_or_make_no_sense_is_corrupt(entries: dict[str, Any]) -> None:
    with pytest.raises(Corrupt) as error:
        payload.decode(np.frombuffer(header_of(**entries) + bytes(16), np.uint8), "x")
    assert one_line(error).isprintable()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        struct.pack("<Q", 1 << 40) + b"{}",
        struct.pack("<Q", 7) + b"nothing",
        header_of(a=entry(0, 1 << 40, [1 << 38])),
        header_of(a=entry(0, 16, [4], "F31")) + bytes(16),
        header_of(a=entry(0, 0, [0, 1 << 62, 1 << 62])),
        header_of(__metadata__={"numpy": '["a"]'}, a=entry(0, 8, [4], "BF16")) + bytes(8),
    ],
    ids=[
        "empty",
        "short",
        "too long",
        "no JSON",
        "beyond the end",
        "of no type",
        "too many dimensions",
        "no numpy type",
    ],
)
def test_verify_names_a_snapshot_whose_tensors_cannot_be_read_though_its_digests_fit(place: Path, data: bytes) -> None:
    store = DirectoryStore(place)
    with_shard(place, 2, data)
    assert snapshot.newest(store).step == 1
    (finding,) = scrub.verify(store)
    assert finding.name == f"{NEWEST}/manifest.json"
    words = {b"": "it cannot have 0 bytes", b"short": "bytes 0 to 8 are not in it"}
    assert words.get(data, "not a well-formed safetensors file") in finding.why


def test_values_that_lie_anywhere_come_back_aligned() -> None:
    text = header_of(a=entry(0, 1, [1], "U8"), b=entry(1, 9, [1], "F64"), c=entry(9, 13, [1])) + bytes(13)
    tensors = payload.decode(np.frombuffer(bytearray(text), np.uint8), "x")
    assert [int(value.data_ptr()) % value.element_size() for value in tensors.values()] == [0, 0, 0]  # type: ignore[union-attr]


# A snapshot whose extra is empty or belongs to another snapshot.


def test_an_empty_extra_is_corrupt_even_if_its_digest_matches(place: Path, holdfast: Callable[..., Ran]) -> None:
    with_extra(place, 2, b"{}")
    with pytest.raises(Corrupt, match=r"extra\.json and its manifest differ in step") as error:
        snapshot.load(DirectoryStore(place), 2)
    one_line(error)
    assert snapshot.newest(DirectoryStore(place)).step == 1
    ran = holdfast("verify", place)
    assert ran.code == 1
    assert ran.out.count(b"bad: ") == 1


@pytest.mark.parametrize("changes", [{"epoch": 3}, {"cursor": 8}, {"world": 2}, {"config": "another"}])
def test_a_snapshot_relabelled_and_sealed_again_is_not_restored(place: Path, changes: dict[str, Any]) -> None:
    sealed_again(place, 2, **changes)
    store = DirectoryStore(place)
    with pytest.raises(Corrupt, match="one of the two files was changed"):
        snapshot.load(store, 2)
    assert snapshot.newest(store).step == 1
    assert [finding.name for finding in scrub.verify(store)] == [f"{NEWEST}/manifest.json"]


def test_a_snapshot_in_the_folder_of_another_step_is_not_restored(place: Path) -> None:
    (place / NEWEST).rename(place / "step-00000009")
    with pytest.raises(Corrupt, match="another snapshot"):
        snapshot.load(DirectoryStore(place), 9)
    sealed_again(place, 9, step=9)
    with pytest.raises(Corrupt, match="one of the two files was changed"):
        snapshot.load(DirectoryStore(place), 9)


def test_a_snapshot_without_a_position_is_corrupt(place: Path) -> None:
    with_extra(place, 2, b'{"step": 2}')
    with pytest.raises(Corrupt, match="one of the two files was changed"):
        snapshot.load(DirectoryStore(place), 2)


# A snapshot of several ranks.

THIRD = "step-00000003"
OF_RANK = tuple(f"shard-{rank:05d}-of-00002.safetensors" for rank in range(2))
ROWS = {"w": torch.arange(12.0).double().reshape(6, 2), "bias": torch.arange(3.0), "count": torch.tensor(7)}


@pytest.fixture
def divided(place: Path) -> Path:
    """The store, with one more snapshot, of which two ranks wrote a part each."""
    saved_by(DirectoryStore(place), 3, 2, ROWS)
    assert snapshot.newest(DirectoryStore(place)).step == 3
    return place


def passed_over(place: Path) -> str:
    """Return why the snapshot of step 3 cannot be used; the one of step 2 is used instead."""
    store = DirectoryStore(place)
    back = snapshot.newest(store)
    assert back.step == 2
    (finding,) = scrub.verify(store)
    assert finding.name == f"{THIRD}/manifest.json"
    with pytest.raises(Corrupt) as error:
        SnapshotReader(store, 3).read("w")
    assert one_line(error).isprintable()
    assert one_line(error) == finding.why == back.passed_over[0].why
    return finding.why


@pytest.mark.parametrize("name", OF_RANK)
def test_a_missing_shard_is_named(divided: Path, name: str) -> None:
    (divided / THIRD / name).unlink()
    assert f"{THIRD}/{name} is missing" in passed_over(divided)


@pytest.mark.parametrize("name", OF_RANK)
def test_a_truncated_shard_is_named(divided: Path, name: str) -> None:
    path = divided / THIRD / name
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{THIRD}/{name} changed after its commit" in passed_over(divided)


@pytest.mark.parametrize("name", OF_RANK)
def test_a_shard_of_another_rank_is_named(divided: Path, name: str) -> None:
    path = divided / THIRD / name
    path.write_bytes((divided / THIRD / OF_RANK[1 - OF_RANK.index(name)]).read_bytes())
    assert f"{THIRD}/{name} changed after its commit" in passed_over(divided)


@pytest.mark.parametrize("name", OF_RANK)
def test_the_shard_of_another_snapshot_is_named_even_if_its_digests_match(divided: Path, name: str) -> None:
    foreign = (divided / NEWEST / SHARD).read_bytes()[: -payload.DIGEST_BYTES]
    with_shard(divided, 3, foreign, name)
    assert f"{THIRD}/{name} does not hold the part of" in passed_over(divided)


@pytest.mark.parametrize("name", OF_RANK)
def test_damaged_digests_of_chunks_are_named(divided: Path, name: str) -> None:
    path = divided / THIRD / name
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert "the digests of its chunks are not those that were committed" in passed_over(divided)


@pytest.mark.parametrize("name", OF_RANK)
def test_chunks_that_do_not_match_their_digests_are_named(divided: Path, name: str) -> None:
    path = divided / THIRD / name
    table = bytes(payload.DIGEST_BYTES)  # which the manifest then confirms
    path.write_bytes(path.read_bytes()[: -len(table)] + table)
    shards = json.loads((divided / THIRD / "manifest.json").read_bytes())["shards"]
    shards[OF_RANK.index(name)][1] = xxhash.xxh3_128_hexdigest(table)
    sealed_again(divided, 3, shards=shards)
    assert "chunk 0 of 1 has another digest" in passed_over(divided)


def layout_of(**changes: Any) -> dict[str, Any]:
    tensors = {"w": ["F64", [6, 2], 0, [[0, 0]]], "bias": ["F32", [3], 0, [[0, 0]]], "count": ["I64", [], 0, []]}
    return {**tensors, **changes}


@pytest.mark.parametrize(
    "tensors",
    [
        layout_of(w=["F64", [7, 2], 0, [[0, 0]]]),  # a row that nobody saved
        layout_of(w=["F64", [5, 2], 0, [[0, 0]]]),  # a row that would be saved twice
        layout_of(w=["F64", [6, 2], 0, []]),  # the rows of rank 1 would be saved by both
        layout_of(w=["F64", [6, 2], 0, [[0, 1]]]),  # columns instead of rows
        layout_of(w=["F32", [6, 2], 0, [[0, 0]]]),
        layout_of(w=["F64", [1 << 40, 2], 0, [[0, 0]]]),
        layout_of(more=["F64", [6, 2], 0, [[0, 0]]]),
        {name: entry for name, entry in layout_of().items() if name != "bias"},
        {"w": layout_of()["w"]},
    ],
)
def test_parts_that_overlap_or_leave_something_out_are_corrupt(divided: Path, tensors: dict[str, Any]) -> None:
    with_layout(divided, 3, tensors=layout_of())
    assert snapshot.newest(DirectoryStore(divided)).step == 3
    with_layout(divided, 3, tensors=tensors)
    assert "does not hold the part of" in passed_over(divided)


@pytest.mark.parametrize(
    "changes",
    [
        {"meshes": []},
        {"meshes": [[3]]},
        {"meshes": [[2, 2]]},
        {"meshes": [[-1, -2]]},
        {"meshes": [[2.0]]},
        {"meshes": [[True, 2]]},
        {"meshes": [2]},
        {"meshes": None},
        {"meshes": "\x1b[31m"},
        {"tensors": []},
        {"tensors": None},
        {"tensors": layout_of(w=[])},
        {"tensors": layout_of(w=7)},
        {"tensors": layout_of(w=["F64", [6, 2], 0])},
        {"tensors": layout_of(w=["\x1b[31m", [6, 2], 0, []])},
        {"tensors": layout_of(w=[64, [6, 2], 0, []])},
        {"tensors": layout_of(w=["F64", [-6, -2], 0, []])},
        {"tensors": layout_of(w=["F64", [6.0, 2], 0, []])},
        {"tensors": layout_of(w=["F64", 12, 0, []])},
        {"tensors": layout_of(w=["F64", [1 << 63], 0, []])},
        {"tensors": layout_of(w=["F64", [6, 2], 1, []])},
        {"tensors": layout_of(w=["F64", [6, 2], -1, []])},
        {"tensors": layout_of(w=["F64", [6, 2], "0", []])},
        {"tensors": layout_of(w=["F64", [6, 2], 0, 7])},
        {"tensors": layout_of(w=["F64", [6, 2], 0, [7]])},
        {"tensors": layout_of(w=["F64", [6, 2], 0, [[0, 2]]])},
        {"tensors": layout_of(w=["F64", [6, 2], 0, [[1, 0]]])},
        {"tensors": layout_of(w=["F64", [6, 2], 0, [[-1, 0]]])},
        {"tensors": layout_of(w=["F64", [6, 2], 0, [[0, 0], [0, 1]]])},
        {"tensors": layout_of(w=["F64", [6, 2], 0, [[0, [0]]]])},
    ],
)
def test_a_layout_that_says_nonsense_is_corrupt_in_one_line(divided: Path, changes: dict[str, Any]) -> None:
    with_layout(divided, 3, **changes)
    assert f"{THIRD}/" in passed_over(divided)


@pytest.mark.parametrize("layout", [None, [], "rows", 7])
def test_a_snapshot_without_a_layout_is_corrupt(divided: Path, layout: Any) -> None:
    extra = json.loads((divided / THIRD / "extra.json").read_bytes())
    with_extra(divided, 3, json.dumps({**extra, "layout": layout}).encode())
    assert f"{THIRD}/" in passed_over(divided)


def test_a_manifest_with_more_or_fewer_ranks_than_saved_is_corrupt(divided: Path) -> None:
    shards = json.loads((divided / THIRD / "manifest.json").read_bytes())["shards"]
    for changed in (shards[:1], [*shards, shards[0]]):
        sealed_again(divided, 3, shards=changed)
        assert f"{THIRD}/" in passed_over(divided)


def test_files_of_ranks_that_are_not_in_the_manifest_are_never_read(divided: Path) -> None:
    for name in ("shard-00002-of-00002.safetensors", "shard-00000-of-00001.safetensors", "shard-0.safetensors"):
        endless(divided / THIRD / name)
    assert snapshot.newest(DirectoryStore(divided)).step == 3
    assert scrub.verify(DirectoryStore(divided)) == []


# Names.


@pytest.mark.parametrize("name", ["step-٠٠٠٠٠٠٠٩", "step-000000009", "step-9", "step-00000009x", "step-\x1b[31m[red]"])
def test_a_folder_named_like_a_snapshot_but_not_by_us_is_named_and_never_read(place: Path, name: str) -> None:
    (place / NEWEST).rename(place / name)
    store = DirectoryStore(place)
    assert manifest.steps(store) == [1]
    assert snapshot.newest(store).step == 1
    assert [finding.name for finding in scrub.verify(store)] == [name]
    assert [finding.name for finding in scrub.inspect(store).unreadable] == [name]


def test_an_index_named_in_other_digits_is_named(place: Path) -> None:
    (place / index_name(0)).rename(place / "running" / "index-٠٠٠٠٠٠٠٠.json")
    assert [finding.name for finding in scrub.verify(DirectoryStore(place))] == ["running/index-٠٠٠٠٠٠٠٠.json"]


def test_what_is_printed_holds_no_escapes_and_no_markup(place: Path, holdfast: Callable[..., Ran]) -> None:
    for name in ("step-\x1b]0;title\x07[bold]", "step-\udcff", "step-\u202egnorw", "step-:bomb:\nall good"):
        (place / os.fsencode(name).decode("utf-8", "surrogateescape")).mkdir()
        (place / name / "manifest.json").write_text("x")
    for command in ("inspect", "verify"):
        ran = holdfast(command, place)
        printed = ran.out.decode()  # and it is UTF-8
        assert (ran.code, ran.err) == (1, b"")
        assert not re.search("[^\n -~─-╿]", printed), printed
        assert r"step-\x1b]0;title\x07[bold]" in printed
        assert r"step-\udcff" in printed
        assert r"step-\u202egnorw" in printed
        assert r"step-:bomb:\nall good" in printed


def test_an_error_about_a_strange_place_holds_no_escapes(tmp_path: Path, holdfast: Callable[..., Ran]) -> None:
    ran = holdfast("verify", tmp_path / "\x1b[31mred\n[bold]")
    assert ran.code == 2
    assert b"\x1b" not in ran.err
    assert b"[bold]" in ran.err
    assert ran.err.count(b"\n") == 1


def test_a_store_of_nothing_but_strange_names_has_no_snapshot(place: Path) -> None:
    for step in (1, 2):
        (place / f"step-{step:08d}").rename(place / f"step-{step}")
    with pytest.raises(NoSnapshot):
        snapshot.newest(DirectoryStore(place))
