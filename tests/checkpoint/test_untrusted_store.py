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
import xxhash

from holdfast import cli, memory
from holdfast.blocks.division import along
from holdfast.checkpoint import payload, retention, scrub, snapshot
from holdfast.checkpoint.digest import seal
from holdfast.checkpoint.index import index_name
from holdfast.checkpoint.running import RunningCheckpoint
from holdfast.checkpoint.store import SMALL, DirectoryStore
from holdfast.errors import BadInput, Corrupt, HoldfastError, NoSnapshot, StorageFailed
from snapshots import saved
from supervisor_process import StartCommand

DEADLINE = 60
STATE = {"w": np.zeros((3, 4))}
BLOCKS = along(STATE, "w")
NEWEST = "step-00000002"
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


def with_payload(place: Path, step: int, name: str, data: bytes) -> None:
    """Replace a payload, and make the manifest match."""
    folder = place / f"step-{step:08d}"
    payloads = json.loads((folder / "manifest.json").read_bytes())["payloads"]
    (folder / name).write_bytes(data)
    payloads[name] = {"length": len(data), "xxh3": xxhash.xxh3_128_hexdigest(data)}
    sealed_again(place, step, payloads=payloads)


# Things that are no files, and files that are too large.


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("name", ["state.safetensors", "extra.json", "manifest.json"])
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
    for name in (f"{NEWEST}/manifest.json", "step-00000001/state.safetensors", "latest.json", index_name(0)):
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
    for name in ("step-00000002/extra.json", "step-00000003/state.safetensors", "step-00000004/manifest.json"):
        os.truncate(place / name, HUGE)
    os.truncate(place / "latest.json", HUGE)
    reader = start_command(place, ROOM, instead=READ)
    assert reader.wait(DEADLINE) == 0, reader.stderr
    assert reader.stdout == "1 4 1\n"


def test_a_length_that_no_memory_holds_is_refused_before_it_is_taken(place: Path) -> None:
    path = place / NEWEST / "state.safetensors"
    os.truncate(path, 4 << 40)
    payloads = json.loads((place / NEWEST / "manifest.json").read_bytes())["payloads"]
    payloads["state.safetensors"]["length"] = 4 << 40
    sealed_again(place, 2, payloads=payloads)
    with pytest.raises(BadInput, match=r"needs 4398046511104 bytes of memory and only \d+ are free") as error:
        snapshot.newest(DirectoryStore(place))
    one_line(error)
    assert 0 < memory.available() < 4 << 40


def test_a_record_larger_than_any_is_refused_before_it_is_read(place: Path) -> None:
    os.truncate(place / NEWEST / "manifest.json", SMALL + 1)
    with pytest.raises(Corrupt, match=f"{SMALL + 1} bytes, more than") as error:
        snapshot.read_manifest(DirectoryStore(place), 2)
    one_line(error)
    payloads = json.loads((place / "step-00000001" / "manifest.json").read_bytes())["payloads"]
    payloads["extra.json"]["length"] = snapshot.EXTRA_LIMIT + 1
    sealed_again(place, 1, payloads=payloads)
    with pytest.raises(Corrupt, match="extra of"):
        snapshot.read_manifest(DirectoryStore(place), 1)


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
        snapshot.remove(store, 2)
    retention.tidy(store, 1)
    retention.keep_last(store, 1)
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == before

    found, passed_over = retention.resume(store)  # the link itself goes out of the way
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
        {"payloads": {"state.safetensors": {"length": -1, "xxh3": "0" * 32}, "extra.json": {}}},
        {"payloads": {"\x1b[2J": {"\x1b[2J": 1}}},
        {"payloads": []},
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
    with_payload(place, 2, "extra.json", data)
    with pytest.raises(Corrupt):
        snapshot.load(store, 2)
    with_payload(place, 2, "state.safetensors", struct.pack("<Q", len(data)) + data)
    (place / "latest.json").write_bytes(data)
    (place / index_name(0)).write_bytes(data)
    assert snapshot.newest(store).step == 1
    assert [finding.name for finding in scrub.verify(store)] == [
        f"{NEWEST}/manifest.json",
        index_name(0),
        "latest.json",
    ]


def test_extra_json_that_holds_no_number_is_corrupt(place: Path) -> None:
    with_payload(place, 2, "extra.json", b'{"lr": NaN}')
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
    with_payload(place, 2, "state.safetensors", data)
    assert snapshot.newest(store).step == 1
    (finding,) = scrub.verify(store)
    assert finding.name == f"{NEWEST}/manifest.json"
    assert "not a well-formed safetensors file" in finding.why


def test_values_that_lie_anywhere_come_back_aligned() -> None:
    text = header_of(a=entry(0, 1, [1], "U8"), b=entry(1, 9, [1], "F64"), c=entry(9, 13, [1])) + bytes(13)
    tensors = payload.decode(np.frombuffer(bytearray(text), np.uint8), "x")
    assert [int(value.data_ptr()) % value.element_size() for value in tensors.values()] == [0, 0, 0]  # type: ignore[union-attr]


# A snapshot whose extra is empty or belongs to another snapshot.


def test_an_empty_extra_is_corrupt_even_if_its_digest_matches(place: Path, holdfast: Callable[..., Ran]) -> None:
    with_payload(place, 2, "extra.json", b"{}")
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
    with_payload(place, 2, "extra.json", b'{"step": 2}')
    with pytest.raises(Corrupt, match="one of the two files was changed"):
        snapshot.load(DirectoryStore(place), 2)


# Names.


@pytest.mark.parametrize("name", ["step-٠٠٠٠٠٠٠٩", "step-000000009", "step-9", "step-00000009x", "step-\x1b[31m[red]"])
def test_a_folder_named_like_a_snapshot_but_not_by_us_is_named_and_never_read(place: Path, name: str) -> None:
    (place / NEWEST).rename(place / name)
    store = DirectoryStore(place)
    assert snapshot.steps(store) == [1]
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
