"""What a message to all nodes takes that asks nothing: the part of a checkpoint that no faster node could save."""

import statistics
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from holdfast.errors import WorkerLost
from holdfast.lab.blocks.comparison import trials_folder
from holdfast.lab.experiment import Options
from holdfast.lab.server.server_trials import NODES, SCAR_ALONE, trial_settings
from holdfast.lab.trial_log import Journal
from holdfast.server.cluster import cluster
from holdfast.server.settings import Settings

if TYPE_CHECKING:
    from holdfast.server.members import Members

TIMES = 25
PATIENCE = 120.0  # seconds for nodes to load everything
KEY = "message/seconds"


def message_seconds(workload: str, options: Options) -> float:
    """The median of some such messages, there and back; measured once and kept in the journal."""
    with closing(Journal(trials_folder(options) / f"server-{workload}.jsonl")) as journal:
        if KEY not in journal.known:
            with TemporaryDirectory(dir=options.out, ignore_cleanup_errors=True) as folder, cluster():
                out = Path(folder).absolute() / "run"
                journal.note(KEY, measured(trial_settings(workload, 1, SCAR_ALONE, 0, out, options.data)))
        return journal.known[KEY]


def measured(settings: Settings) -> float:
    """Start nodes that hold nothing, and send them messages."""
    import ray

    from holdfast.server.calls import Member
    from holdfast.server.members import Members
    from holdfast.server.node import THREADS, Node

    members = Members()
    options: Any = {"num_cpus": 0, "concurrency_groups": THREADS}
    made: Any = ray.remote(**options)(Node)
    for number in range(NODES):
        members.admit(Member("node", number), made.remote(number, settings))
    try:
        _sent(members)  # they load everything first
        return statistics.median(_sent(members) for _ in range(TIMES))
    finally:
        for member in members.all():
            members.expel(member)


def _sent(members: "Members") -> float:
    began = time.perf_counter()
    missing = members.ask("node", "ready", dict.fromkeys(members.nodes, ()), PATIENCE).missing
    if missing:
        raise WorkerLost(f"nodes did not answer a message that asks nothing: {missing}; run the experiment again")
    return time.perf_counter() - began
