"""Trials of `server-overhead`: a topic model on the parameter server; half of the nodes are killed in iteration 7.

The measurements are copied from the server's history to the trial log, so a finished trial never runs again.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from holdfast import events
from holdfast.blocks.division import Floats
from holdfast.blocks.policy import Policy
from holdfast.code_digest import code_digest
from holdfast.errors import WorkerLost
from holdfast.faults.schedule import Failure
from holdfast.history.log import recall
from holdfast.lab.experiment import Meter, Options, TrialLog
from holdfast.server.cluster import cluster
from holdfast.server.driver import serve
from holdfast.server.settings import Settings

NODES, WORKERS = 4, 2
KILLED = (0, 1)
FAILS = 7  # the iteration in which nodes are killed, counted from 1
INTERVAL = 4  # iterations in which saves together have the bytes of a full checkpoint
ENDS_WITHIN = 600.0  # the most seconds that a trial may take
MEASURED = ("loss", "seconds", "pull", "compute", "push", "apply", "checkpoint")


@dataclass(frozen=True, slots=True)
class ExperimentArm:
    """A variant of the experiment: a checkpoint policy and a recovery strategy, with failures if `fails`."""

    name: str
    policy: Policy
    recovery: str
    fails: bool = False
    lasts: int = 1  # less if it converges before

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The failures to inject: half of the nodes fail in iteration 7, or no node fails if `fails` is False."""
        return (Failure(step=FAILS - 1, kind="node", point="apply", targets=KILLED),) if self.fails else ()


QUARTERS = Policy(ranking="priority", interval=INTERVAL, fraction=Fraction(1, 4))
SELDOM = Policy(ranking="priority", interval=4 * INTERVAL, fraction=Fraction(1, 4))
WHOLE = Policy(ranking="full", interval=INTERVAL)

SCAR = ExperimentArm("scar", QUARTERS, "partial", fails=True)
FULL = ExperimentArm("traditional", WHOLE, "full", fails=True)
SCAR_ALONE = ExperimentArm("scar, no failure", QUARTERS, "partial")
FULL_ALONE = ExperimentArm("traditional, no failure", WHOLE, "full")
SIDE_BY_SIDE = ExperimentArm("a quarter every 4th iteration, no failure", SELDOM, "partial", lasts=2)
ARMS = (SCAR, FULL, SCAR_ALONE, FULL_ALONE, SIDE_BY_SIDE)


@dataclass(frozen=True, slots=True, eq=False)
class ServerTrial:
    """One training run of the variant `arm`, with the loss and the seconds of each iteration in `columns`."""

    arm: ExperimentArm
    seed: int
    columns: Mapping[str, Floats]

    @property
    def losses(self) -> Floats:
        return self.columns["loss"]


def run_trials(
    workload: str, iterations: int, arms: Sequence[ExperimentArm], seeds: Sequence[int], options: Options, meter: Meter
) -> list[ServerTrial]:
    """Run each variant in `arms` with each seed, unless the log already has the results; return all trials."""
    progress = meter(f"{workload} on {NODES} nodes", len(arms) * len(seeds))
    trials = []
    with closing(options.open_log(f"server-{workload}", code_digest())) as log, ExitStack() as stack:
        todo = [(arm, seed, arm.lasts * iterations) for seed in seeds for arm in arms]
        if any(_known(log, *trial) is None for trial in todo):
            stack.enter_context(cluster())
        for arm, seed, length in todo:
            if _known(log, arm, seed, length) is None:
                iterates = _serve(workload, length, arm, seed, options)
                for number, iterate in enumerate(iterates):
                    for name in MEASURED:
                        log.record(_key(arm, seed, length, name, number), getattr(iterate, name))
                log.record(_key(arm, seed, length, "length"), len(iterates))  # last: it marks the trial as finished
            columns = _known(log, arm, seed, length)
            assert columns is not None
            trials.append(ServerTrial(arm, seed, columns))
            progress(1)
    return trials


def _serve(workload: str, iterations: int, arm: ExperimentArm, seed: int, options: Options) -> list[events.Iterate]:
    deadline = time.monotonic() + ENDS_WITHIN

    def check_deadline(_: object) -> None:
        if time.monotonic() > deadline:
            raise WorkerLost(
                f"{arm.name} with seed {seed} did not end within {ENDS_WITHIN:g} s: run the experiment again; it resumes "
                "after the trials that are finished."
            )

    with TemporaryDirectory(dir=options.out, ignore_cleanup_errors=True) as folder:
        out = Path(folder).absolute() / "run"
        settings = Settings(
            workload=workload,
            nodes=NODES,
            workers=WORKERS,
            policy=arm.policy,
            out=out,
            store=str(out / "checkpoints"),
            data=None if options.data is None else options.data.absolute(),
            recovery=arm.recovery,
            seed=seed,
            iterations=iterations,
            failures=arm.failures,
        )
        serve(settings, report=check_deadline)
        history = [event.what for event in recall(settings.history / "controller.jsonl", "iterate", "struck")]
    if arm.failures and not any(isinstance(what, events.Struck) for what in history):
        raise WorkerLost(f"{arm.name} with seed {seed} ended before iteration {FAILS}, so no node was killed.")
    return [what for what in history if isinstance(what, events.Iterate)]


def _known(log: TrialLog, arm: ExperimentArm, seed: int, iterations: int) -> dict[str, Floats] | None:
    length = log.get(_key(arm, seed, iterations, "length"))
    if length is None:
        return None
    return {
        name: np.array([log.known[_key(arm, seed, iterations, name, number)] for number in range(int(length))])
        for name in MEASURED
    }


def _key(arm: ExperimentArm, seed: int, iterations: int, *parts: object) -> str:
    return "/".join(map(str, (arm.name, seed, iterations, *parts)))
