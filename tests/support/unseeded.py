"""A fixture for tests that attach runs: each begins like a new process, in which nothing has seeded torch."""

import pytest
import torch


@pytest.fixture(autouse=True)
def unseeded() -> None:
    """Forget the seed that an earlier test set, which would become the seed of the next run."""
    torch.seed()
