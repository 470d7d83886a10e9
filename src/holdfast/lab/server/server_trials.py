"""Trials of `server-overhead`: a topic model on the parameter server, half of whose nodes are killed in its 7th iteration.

Every trial starts the processes of a server, trains, and is read from the history that the server wrote. What is read is
kept in the journal, so a trial that is done is never run again.

What a message to all nodes takes that asks nothing: the part of a checkpoint that no faster node could save.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast import events
from holdfast.blocks.division import Floats
from holdfast.blocks.policy import Policy
from holdfast.errors import WorkerLost
from holdfast.faults.schedule import Failure
from holdfast.history.log import recall
from holdfast.lab.experiment import Meter, Options
from holdfast.lab.partial.comparison import trials_folder
from holdfast.lab.trial_log import TrialLog
from holdfast.server.cluster import cluster
from holdfast.server.driver import serve
from holdfast.server.settings import Settings

NODES, WORKERS = 4, 2
KILLED = (0, 1)
FAILS = 7  # the iteration in which nodes are killed, counted from 1
INTERVAL = 4  # iterations in which as much is saved as the whole state
ENDS_WITHIN = 600.0  # seconds for a trial
MEASURED = ("loss", "seconds", "pull", "compute", "push", "apply", "checkpoint")


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to save and to recover, with a failure or without."""

    name: str
    policy: Policy
    recovery: str
    fails: bool = False
    lasts: int = 1  # times the iterations of the others, or until it converges

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Half of the nodes, at the end of the 7th iteration: when what workers pushed is about to be applied."""
        return (Failure(step=FAILS - 1, kind="node", point="apply", targets=KILLED),) if self.fails else ()


QUARTERS = Policy(ranking="priority", interval=INTERVAL, fraction=Fraction(1, 4))
SELDOM = Policy(ranking="priority", interval=4 * INTERVAL, fraction=Fraction(1, 4))
WHOLE = Policy(ranking="full", interval=INTERVAL)

SCAR, FULL = Arm("scar", QUARTERS, "partial", fails=True), Arm("traditional", WHOLE, "full", fails=True)
SCAR_ALONE, FULL_ALONE = Arm("scar, no failure", QUARTERS, "partial"), Arm("traditional, no failure", WHOLE, "full")
SIDE_BY_SIDE = Arm("a quarter every 4th iteration, no failure", SELDOM, "partial", lasts=2)
ARMS = (SCAR, FULL, SCAR_ALONE, FULL_ALONE, SIDE_BY_SIDE)


@dataclass(frozen=True, slots=True, eq=False)
class ServerTrial:
    """What every iteration of a trial gave: the loss after it, and its seconds in all and in each part."""

    arm: Arm
    seed: int
    of: Mapping[str, Floats]

    @property
    def losses(self) -> Floats:
        """The loss after every iteration."""
        return self.of["loss"]

    @property
    def rest(self) -> Floats:
        """Seconds of every iteration without those in which training waits for a checkpoint."""
        return self.of["seconds"] - self.of["checkpoint"]


def run_trials(
    workload: str, iterations: int, arms: Sequence[Arm], seeds: Sequence[int], options: Options, meter: Meter
) -> list[ServerTrial]:
    """All arms of the first seed, then of the second, and so on; those that the journal knows are not run again."""
    progress = meter(f"{workload} on {NODES} nodes", len(arms) * len(seeds))
    done = []
    with closing(TrialLog(trials_folder(options) / f"server-{workload}.jsonl")) as journal:
        todo = [(arm, seed, arm.lasts * iterations) for seed in seeds for arm in arms]
        if any(_known(journal, *each) is None for each in todo):
            with cluster():
                for each in todo:
                    done.append(_trial(workload, *each, options, journal))
                    progress(1)
        else:
            done = [_trial(workload, *each, options, journal) for each in todo]
    return done


def _trial(workload: str, arm: Arm, seed: int, iterations: int, options: Options, journal: TrialLog) -> ServerTrial:
    known = _known(journal, arm, seed, iterations)
    if known is None:
        told = _served(workload, iterations, arm, seed, options)
        for number, iterate in enumerate(told):
            for name in MEASURED:
                journal.note(_key(arm, seed, iterations, name, number), getattr(iterate, name))
        journal.note(_key(arm, seed, iterations, "length"), len(told))  # last: without it the trial is not done
        known = _known(journal, arm, seed, iterations)
    assert known is not None
    return ServerTrial(arm, seed, known)


def _served(workload: str, iterations: int, arm: Arm, seed: int, options: Options) -> list[events.Iterate]:
    """Run a trial in a folder of its own, which is gone afterwards."""
    deadline = time.monotonic() + ENDS_WITHIN

    def watch(_: object) -> None:
        if time.monotonic() > deadline:
            raise WorkerLost(
                f"{arm.name} with seed {seed} did not end within {ENDS_WITHIN:g} s: run the experiment again, which goes "
                "on from the trials that are done"
            )

    with TemporaryDirectory(dir=options.out, ignore_cleanup_errors=True) as folder:
        settings = trial_settings(workload, iterations, arm, seed, Path(folder).absolute() / "run", options.data)
        serve(settings, report=watch)
        told = [event.what for event in recall(settings.history / "controller.jsonl", "iterate", "struck")]
    if arm.failures and not any(isinstance(what, events.Struck) for what in told):
        raise WorkerLost(f"{arm.name} with seed {seed} ended before iteration {FAILS}, so nobody was killed")
    return [what for what in told if isinstance(what, events.Iterate)]


def trial_settings(workload: str, iterations: int, arm: Arm, seed: int, out: Path, data: Path | None) -> Settings:
    """How a trial is served, in a folder."""
    return Settings(
        workload=workload,
        nodes=NODES,
        workers=WORKERS,
        policy=arm.policy,
        out=out,
        store=str(out / "checkpoints"),
        data=None if data is None else data.absolute(),
        recovery=arm.recovery,
        seed=seed,
        iterations=iterations,
        failures=arm.failures,
    )


def _known(journal: TrialLog, arm: Arm, seed: int, iterations: int) -> dict[str, Floats] | None:
    """What the journal has of a trial, if it is done; one that converged may be shorter than it was allowed to be."""
    length = journal.known.get(_key(arm, seed, iterations, "length"))
    if length is None:
        return None
    return {
        name: np.array([journal.known[_key(arm, seed, iterations, name, number)] for number in range(int(length))])
        for name in MEASURED
    }


def _key(arm: Arm, seed: int, iterations: int, *what: object) -> str:
    return "/".join(map(str, (arm.name, seed, iterations, *what)))


if TYPE_CHECKING:
    from holdfast.server.members import ServerMembers

TIMES = 25
PATIENCE = 120.0  # seconds for nodes to load everything
KEY = "message/seconds"


def message_seconds(workload: str, options: Options) -> float:
    """The median of some such messages, there and back; measured once and kept in the journal."""
    with closing(TrialLog(trials_folder(options) / f"server-{workload}.jsonl")) as journal:
        if KEY not in journal.known:
            with TemporaryDirectory(dir=options.out, ignore_cleanup_errors=True) as folder, cluster():
                out = Path(folder).absolute() / "run"
                journal.note(KEY, measure_message(trial_settings(workload, 1, SCAR_ALONE, 0, out, options.data)))
        return journal.known[KEY]


def measure_message(settings: Settings) -> float:
    """Start nodes that hold nothing, and send them messages."""
    import ray

    from holdfast.server.members import Member, ServerMembers
    from holdfast.server.server_node import THREADS, ServerNode

    members = ServerMembers()
    options: Any = {"num_cpus": 0, "concurrency_groups": THREADS}
    made: Any = ray.remote(**options)(ServerNode)
    for number in range(NODES):
        members.admit(Member("node", number), made.remote(number, settings))
    try:
        _sent(members)  # they load everything first
        return statistics.median(_sent(members) for _ in range(TIMES))
    finally:
        for member in members.all():
            members.expel(member)


def _sent(members: "ServerMembers") -> float:
    began = time.perf_counter()
    missing = members.ask("node", "ready", dict.fromkeys(members.nodes, ()), PATIENCE).missing
    if missing:
        raise WorkerLost(f"nodes did not answer a message that asks nothing: {missing}; run the experiment again")
    return time.perf_counter() - began
