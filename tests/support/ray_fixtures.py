"""One Ray for all tests that need it, because it takes seconds to start."""

import os
from collections.abc import Iterator

import pytest

os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "."  # before Ray is imported: it prints whatever is killed
os.environ.setdefault("RAY_kill_worker_timeout_milliseconds", "1000")  # for a process that does not end; else 5 s


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Run Ray on this machine until the session ends."""
    from holdfast.server.cluster import cluster  # Ray takes a second to import

    with cluster():
        yield
