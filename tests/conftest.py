"""Settings and fixtures that all tests share: fast temporary folders, a real S3 server, and one store of each kind.

Helpers that tests import, and scripts that they run, are in tests/support.
"""

import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from hypothesis import settings

from holdfast.checkpoint.objects import ObjectStore
from holdfast.checkpoint.store import DirectoryStore, Store
from holdfast.train.observe.unprotected_state import UnprotectedStateCheck

# There is no deadline, because test machines are shared. HYPOTHESIS_PROFILE selects the number of examples.
settings.register_profile("holdfast", deadline=None, print_blob=True, max_examples=50)
settings.register_profile("quick", deadline=None, print_blob=True, max_examples=10)
settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "holdfast"))

# Temporary folders are in memory if there is enough of it, because a sync may take a tenth of a second on a busy disk.
# SIGKILL keeps the page cache, and power cuts are simulated, so only tests with the fixture `on_disk` need a real disk.
MEMORY, ENOUGH = Path("/dev/shm"), 4 << 30
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ENOUGH:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))  # where pytest creates its folders

# Background jobs of a shell ignore SIGINT, and child processes inherit that; tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["attached_runs", "ray_fixtures", "supervisor_fixtures"]

TESTS = Path(__file__).parent
READY_WITHIN = 60.0
PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")


# Tests in these places, or with these fixtures, start processes, Ray, a browser or an S3 server, or compute for seconds.
SLOW_PLACES = {
    "integration",
    "crash",
    "lab",
    "server",
    "workloads",
    "advice/test_large_job.py",
    "checkpoint/test_running.py",
    "checkpoint/test_untrusted_store.py",
    "checkpoint/test_writer.py",
    "cli/test_advise.py",
    "cli/test_cli.py",
    "distributed/test_gloo_link.py",
    "docs/test_tutorial.py",
    "supervise/nodes/test_connection.py",
    "test_install.py",
    "train/observe/test_unprotected_state.py",
    "trainers/test_refused_options.py",
    "weights/test_export.py",
}
SLOW_FIXTURES = {"start", "driver", "ray_cluster", "s3"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests, and put those that need Ray or the S3 server first so that one process starts each once.

    `make test` has two processes: the first begins with the first test, and a process that has run out of tests takes
    some from the end of the other's queue.
    """
    for item in items:
        place = item.path.relative_to(TESTS).as_posix()
        if _needs_s3(item) or SLOW_FIXTURES & _fixtures(item) or SLOW_PLACES & {place, place.partition("/")[0]}:
            item.add_marker("slow")
    items.sort(key=lambda item: ("ray_cluster" not in _fixtures(item), not _needs_s3(item)))


def pytest_collection_finish() -> None:
    """Exempt all imported modules from garbage collection, which would otherwise search torch again and again."""
    gc.collect()
    gc.freeze()


def _fixtures(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))


def _needs_s3(item: pytest.Item) -> bool:
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return "s3" in _fixtures(item) or params.get("store") == "s3"


@pytest.fixture(autouse=True)
def unchecked_variables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not search the variables of this process for unprotected state: they are those of all tests, and many.

    Scripts in processes of their own are searched, and so are the tests of the search."""
    if request.path.parent.name != "observe":
        monkeypatch.setattr(UnprotectedStateCheck, "look", lambda *_: None)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """The fsspec options for an S3 server of this session, with a bucket named `holdfast`."""
    for attempt in range(3):  # another process may take a free port before the server does
        folder = tmp_path_factory.mktemp(f"s3-{attempt}")
        ports = _free_ports(2 + len(PORTS))
        server = _start(folder, ports)
        try:
            options: dict[str, object] = {"key": "any", "secret": "any", "endpoint_url": f"http://127.0.0.1:{ports[0]}"}
            if _ready(server, options):
                yield options
                return
        finally:
            server.kill()  # stopping in order takes seconds, and its data is not needed
            server.wait(10)
            for port in ports:  # its sockets are outside its folder
                for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    left.unlink(missing_ok=True)
    pytest.fail(f"no S3 server came up; its log:\n{(folder / 'log').read_text()[-2000:]}")


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """An empty folder on the machine's disk for temporary files."""
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        yield Path(folder)


@pytest.fixture(params=["directory", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind in turn."""
    if request.param == "directory":
        return DirectoryStore(tmp_path / "store")
    if request.param == "memory":
        return ObjectStore(f"memory://{uuid.uuid4().hex}")
    return ObjectStore(f"s3://holdfast/{uuid.uuid4().hex}", **request.getfixturevalue("s3"))


def _start(folder: Path, ports: list[int]) -> subprocess.Popen[bytes]:
    s3_port, grpc_port, *others = ports
    arguments = [
        str(Path(sys.executable).parent / "weed"),
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        *(f"-{name}={port}" for name, port in zip(PORTS, others, strict=True)),
        "-s3",
        f"-s3.port={s3_port}",
        f"-s3.port.grpc={grpc_port}",
        f"-s3.localSocket={folder / 's3.sock'}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.iam=false",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=64",
        "-volume.preStopSeconds=0",
    ]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT, cwd=folder)


def _ready(server: subprocess.Popen[bytes], options: dict[str, object]) -> bool:
    """Wait until the server accepts a bucket and an object; return False if it exits or the deadline passes."""
    once = {"retries": {"max_attempts": 0}, "connect_timeout": 2, "read_timeout": 5}
    deadline = time.monotonic() + READY_WITHIN
    while time.monotonic() < deadline and server.poll() is None:
        try:
            fs = fsspec.filesystem("s3", skip_instance_cache=True, config_kwargs=once, **options)
            fs.makedirs("holdfast", exist_ok=True)
            fs.pipe_file("holdfast/ready", b"yes")
        except Exception:  # any error is possible while the server starts
            time.sleep(0.2)
        else:
            return True
    return False


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]
    finally:
        for free in sockets:
            free.close()
