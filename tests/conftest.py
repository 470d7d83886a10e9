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

# The tests compute with one thread, which libraries decide when they are loaded: in several test processes on few cores,
# threads would mostly wait for each other. Processes that tests start decide for themselves.
os.environ["OMP_NUM_THREADS"] = "1"
import torch  # noqa: F401

del os.environ["OMP_NUM_THREADS"]

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

pytest_plugins = ["attached_runs", "ray_fixtures", "supervisor_fixtures", "undrawn_figures"]

TESTS = Path(__file__).parent
READY_WITHIN = 60.0
PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")


# Tests in these places, or with these fixtures, start processes, Ray, a browser or an S3 server, or compute for seconds.
SLOW_PLACES = {
    "integration",
    "crash",
    "simulation",
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
    "docs/test_quick_start.py",
    "docs/test_tutorial.py",
    "supervise/nodes/test_connection.py",
    "test_install.py",
    "train/observe/test_unprotected_state.py",
    "train/state/test_shards.py",
    "trainers/test_refused_options.py",
    "weights/test_export.py",
}
SLOW_FIXTURES = {"start", "driver", "ray_cluster", "s3"}

# Roughly the seconds that the tests of a module take, where they are many, and those of all tests with a server. They
# only decide which process runs which tests, and when: a wrong number makes the tests a little slower.
SERVERS = "servers"
SECONDS = {
    SERVERS: 200,
    "blocks/test_own_policy.py": 20,
    "checkpoint/test_running.py": 25,
    "checkpoint/test_writer.py": 20,
    "distributed/test_process_group.py": 30,
    "docs/test_quick_start.py": 6,
    "docs/test_tutorial.py": 12,
    "integration/test_browser.py": 25,
    "integration/test_checkpoint_place.py": 15,
    "integration/test_corruption.py": 15,
    "integration/test_exact.py": 35,
    "integration/test_examples.py": 12,
    "integration/test_gpt_example.py": 10,
    "integration/test_initial_shards.py": 15,
    "integration/test_inject.py": 20,
    "integration/test_live.py": 30,
    "integration/test_live_hang.py": 25,
    "integration/test_live_last_step.py": 18,
    "integration/test_live_nodes.py": 25,
    "integration/test_live_two_models.py": 9,
    "integration/test_live_values.py": 20,
    "integration/test_lost_nodes.py": 40,
    "integration/test_main_process.py": 8,
    "integration/test_matrix_runs.py": 15,
    "integration/test_modules.py": 8,
    "integration/test_nodes.py": 20,
    "integration/test_phases.py": 10,
    "integration/test_rehearsal.py": 35,
    "integration/test_samplers.py": 10,
    "integration/test_sharded.py": 75,
    "integration/test_sharded_examples.py": 30,
    "integration/test_sharded_live.py": 90,
    "integration/test_sharded_partial.py": 25,
    "integration/test_sharded_trainers.py": 70,
    "integration/test_slow_saves.py": 25,
    "integration/test_standby.py": 15,
    "integration/test_supervisor.py": 35,
    "integration/test_supervisor_environment.py": 20,
    "integration/test_tensor_parallel.py": 45,
    "integration/test_trainers.py": 25,
    "lab/backprop/test_backprop_tradeoff.py": 25,
    "lab/partial/test_comparison.py": 30,
    "lab/partial/test_own_model.py": 25,
    "lab/sharded/test_sharded_tradeoff.py": 15,
    "live/sharded/test_every_collective.py": 25,
    "live/sharded/test_shadow.py": 10,
    "server/test_cluster.py": 45,
    "server/test_controller.py": 50,
    "supervise/nodes/test_connection.py": 15,
    "test_install.py": 25,
    "train/observe/test_unprotected_state.py": 20,
    "train/state/test_shards.py": 30,
    "workloads/test_divided.py": 15,
}
OTHER_SECONDS = 0.2  # of another slow test


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import slow modules, and the libraries that they import, if no slow test is wanted."""
    return _is_slow(collection_path) or None if config.option.markexpr == "not slow" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark slow tests, let pytest select among all of them, and order what it selected.

    Tests that need Ray or the S3 server come first, so that one process starts each once.
    """
    for item in items:
        if _needs_s3(item) or SLOW_FIXTURES & _fixtures(item) or _is_slow(item.path):
            item.add_marker("slow")
    yield
    items.sort(key=lambda item: ("ray_cluster" not in _fixtures(item), not _needs_s3(item)))
    processes = getattr(config, "workerinput", {}).get("workercount", 1)  # of pytest-xdist
    if processes > 1:
        items[:] = _spread(items, processes)


def _spread(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Order tests so that every process begins with a fair part of the long ones and ends with quick ones.

    Each process gets a share of the list, of equal length, and runs it from its beginning. When it is done, it takes
    tests from the end of another's share, which should be quick: nobody waits for a long test that began last. The
    tests of a module stay together, as do all that need a server.
    """
    groups: dict[str, list[pytest.Item]] = {}
    quick = []
    for item in items:
        place = SERVERS if "ray_cluster" in _fixtures(item) or _needs_s3(item) else _place(item)
        is_long = place in SECONDS or item.get_closest_marker("slow")
        (groups.setdefault(place, []) if is_long else quick).append(item)
    seconds = {place: SECONDS.get(place, OTHER_SECONDS * len(group)) for place, group in groups.items()}
    shares: list[list[pytest.Item]] = [[] for _ in range(processes)]
    loads = [0.0] * processes
    for place in sorted(groups, key=lambda place: (place != SERVERS, -seconds[place])):
        least = loads.index(min(loads))
        shares[least] += groups[place]
        loads[least] += seconds[place]
    for number, share in enumerate(shares):
        room = max(0, (number + 1) * len(items) // processes - number * len(items) // processes - len(share))
        share += quick[:room]
        del quick[:room]
    return [item for share in shares for item in share] + quick


def pytest_collection_finish() -> None:
    """Exempt all imported modules from garbage collection, which would otherwise search torch again and again."""
    gc.collect()
    gc.freeze()


def _place(item: pytest.Item) -> str:
    """Return the path of a test's module in the folder of the tests."""
    return item.path.relative_to(TESTS).as_posix()


def _is_slow(path: Path) -> bool:
    """Return True if all tests of a folder or module are slow."""
    place = path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""
    return bool(SLOW_PLACES & {place, place.partition("/")[0]})


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
