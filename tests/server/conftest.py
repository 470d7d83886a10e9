"""One Ray for all tests of the server: it takes seconds to start."""

from collections.abc import Iterator

import pytest

from holdfast.server.job import cluster


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Ray on this machine, until the session ends."""
    with cluster():
        yield
