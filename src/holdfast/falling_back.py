"""Where live recovery ends: only a restart of all workers helps, and the supervisor is told so."""

from holdfast import progress
from holdfast.errors import WorkerLost


def fallen_back(why: str) -> WorkerLost:
    """Say, to the supervisor too, that only a restart helps."""
    progress.here.falls_back()
    return WorkerLost(f"{why}: the run starts again from its newest snapshot")
