"""The kinds of schedules: odd seeds play a run that recovers live, and even seeds saves, restarts and split clusters."""

from simulation.live import play_live
from simulation.schedule import Outcome, play


def play_any(seed: int) -> Outcome:
    """Play the schedule of `seed`, of the kind that its parity selects."""
    return (play_live if seed % 2 else play)(seed)
