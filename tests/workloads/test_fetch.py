"""Fetching: a data file arrives whole and checked, or not at all and one line says why."""

import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.progress import Progress

from holdfast.errors import DataMissing, HoldfastError, StorageFailed
from holdfast.workloads.fetch import DataFile, cache_folder, obtain

CONTENT = bytes(range(256)) * 4096  # a megabyte: several reads


class Home(BaseHTTPRequestHandler):
    """A data set's home that serves the file whole, changed, cut short, without its length, or not at all."""

    def do_GET(self) -> None:
        if self.path not in ("/whole", "/changed", "/cut", "/lengthless"):
            self.send_error(404, "Not here")
            return
        self.send_response(200)
        if self.path != "/lengthless":
            self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        body = {"/cut": CONTENT[:300_000], "/changed": CONTENT[:-1] + b"!"}.get(self.path, CONTENT)
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: what the server did is seen in what arrived."""


@pytest.fixture
def home() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Home) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(timeout=30)
        assert not thread.is_alive()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HOLDFAST_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")  # the machine may have a proxy, which is not what is tested
    return tmp_path / "cache" / "holdfast"


def file_at(*urls: str) -> DataFile:
    return DataFile(
        dataset="letters",
        folders=("letters", "."),
        names=("letters.gz", "letters"),
        urls=urls,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.is_dir()]


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("path", ["/whole", "/lengthless"])
def test_a_file_is_fetched_into_the_cache_once(home: str, cache: Path, path: str) -> None:
    fetched = obtain(file_at(home + path))
    assert fetched == cache / "letters" / "letters.gz"
    assert fetched.read_bytes() == CONTENT
    assert files_below(cache) == [fetched]
    assert obtain(file_at(home + "/gone")) == fetched  # the home is not asked again


def test_a_file_in_the_data_folder_is_not_fetched(home: str, cache: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine" / "letters"
    mine.parent.mkdir()
    mine.write_bytes(b"my own")
    assert obtain(file_at(home + "/whole"), data=tmp_path / "mine") == mine
    assert not cache.exists()


@pytest.mark.parametrize("path", ["/changed", "/cut", "/gone"])
def test_a_mirror_helps_when_the_official_home_does_not(home: str, cache: Path, path: str) -> None:
    assert obtain(file_at(home + path, home + "/whole")).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/changed", "sha256 is [0-9a-f]{12}, expected [0-9a-f]{12}"),
        ("/cut", "the transfer ended after 300000 of 1048576 bytes"),
        ("/gone", "HTTP Error 404: Not here"),
    ],
)
def test_an_incomplete_download_leaves_no_file_and_explains_what_to_do(
    home: str, cache: Path, tmp_path: Path, path: str, reason: str
) -> None:
    with pytest.raises(DataMissing, match=reason) as caught:
        obtain(file_at(home + path), data=tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    for said in ("letters: no letters.gz", home + path, str(tmp_path), str(cache), "--data DIR", "$HOLDFAST_DATA"):
        assert said in message
    assert files_below(cache) == []


def test_an_unreachable_server_raises_data_missing(cache: Path) -> None:
    with pytest.raises(DataMissing, match="Connection refused"):
        obtain(file_at(f"http://127.0.0.1:{closed_port()}/whole"))
    assert files_below(cache) == []


def test_a_download_shows_its_progress(home: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, float, float | None]] = []

    class Watched(Progress):
        def update(self, task_id, **changes):  # type: ignore[no-untyped-def]
            super().update(task_id, **changes)
            (task,) = self.tasks
            seen.append((task.description, task.completed, task.total))

    monkeypatch.setattr("holdfast.workloads.fetch.Progress", Watched)
    obtain(file_at(home + "/whole"))
    assert seen[-1] == ("whole", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_a_cache_that_cannot_be_written_is_a_storage_failure(home: str, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_bytes(b"a file where the folder should be")
    with pytest.raises(StorageFailed, match=r"cannot keep letters.gz in .*\$XDG_CACHE_HOME"):
        obtain(file_at(home + "/whole"))
    assert cache.read_bytes() == b"a file where the folder should be"


def test_two_that_fetch_at_once_both_get_the_file(home: str, cache: Path) -> None:
    got: list[bytes | HoldfastError] = []

    def one() -> None:
        try:
            got.append(obtain(file_at(home + "/whole")).read_bytes())
        except HoldfastError as error:
            got.append(error)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert got == [CONTENT] * 4
    assert len(files_below(cache)) == 1


def test_the_cache_is_where_the_desktop_convention_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", os.sep + "home")
    assert cache_folder() == Path("/home/.cache/holdfast")
