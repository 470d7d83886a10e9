"""Whether the machine's part of Ray that a process depends on still runs.

A process whose raylet was stopped or killed goes on answering small calls for a while, and cannot send or receive
anything large. So a member that is asked whether it lives looks at its raylet too.
"""

import os
from pathlib import Path

RAYLET = "RAY_RAYLET_PID"  # set by Ray in every process that it starts


def raylet_lives() -> bool:
    """Whether our raylet runs and is not stopped; yes where that cannot be seen."""
    pid = os.environ.get(RAYLET)
    if pid is None or not Path("/proc/self/stat").exists():
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "TtZX"
