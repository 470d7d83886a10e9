"""Trials per second of MLR on MNIST: batched by the simulator, against one at a time from scratch in numpy.

usage: python benchmarks/trials/bench.py DATA [--trials 200] [--repeats 3] [--naive 2]

A trial trains with a full checkpoint every 8 iterations, loses half of the rows at a random iteration, restores the lost
rows from the checkpoint, and continues to the criterion. Both sides run the same trials and must find the same iteration
counts, in fractions and up to rounding. The batched side includes the unperturbed run. Both may use all cores.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from holdfast.blocks.policy import Policy
from holdfast.blocks.recoveries import partial
from holdfast.faults.schedule import geometric_steps, lost_blocks
from holdfast.lab.simulate.lanes import Start, crossing, iterations_to_criterion, start_as_given, trajectory
from holdfast.lab.simulate.strategy import last_saved, recovered_state
from holdfast.workloads.mlr import LogisticRegression, mlr

INTERVAL, LENGTH = 8, 66  # the unperturbed run takes 66 iterations
# The two sides sum in different orders, so their losses differ by about a millionth in float32; near the criterion the
# loss falls by about a hundredth per iteration. Whole counts may then differ by one by chance; fractions do not.
ROUNDING = 0.01  # iterations


@dataclass(frozen=True)
class Trial:
    """The lost rows, and the iteration after which they are lost."""

    step: int
    lost: np.ndarray


def main() -> None:
    """Measure both sides, compare their results and print the ratio."""
    arguments = parse_arguments()
    workload = mlr("mnist", arguments.data)
    trials = list(draw_trials(arguments.trials, len(workload.blocks)))
    rates: dict[str, list[float]] = {"naive": [], "batched": []}
    for repeat in range(arguments.repeats):
        few = trials[repeat * arguments.naive : (repeat + 1) * arguments.naive]
        began = time.perf_counter()
        alone = [naive(workload, trial) for trial in few]
        rates["naive"].append(len(few) / (time.perf_counter() - began))
        began = time.perf_counter()
        together = batched(workload, trials)
        rates["batched"].append(len(trials) / (time.perf_counter() - began))
        same = together[repeat * arguments.naive :][: len(few)]
        assert agree(alone, same), f"the same trials took {alone} and {same.tolist()}"
        ratio = rates["batched"][-1] / rates["naive"][-1]
        print(
            f"repeat {repeat + 1}: naive {rates['naive'][-1]:.3f}, batched {rates['batched'][-1]:.2f} trials/s, {ratio:.1f}x",
            flush=True,
        )
    ratios = [b / n for b, n in zip(rates["batched"], rates["naive"], strict=True)]
    print(f"median {statistics.median(ratios):.1f}x ({min(ratios):.1f} to {max(ratios):.1f})")
    print(f"claim: at least 10x: {'holds' if statistics.median(ratios) >= 10 else 'DOES NOT HOLD'}")


def draw_trials(count: int, rows: int) -> Iterator[Trial]:
    """Draw the trials from a fixed seed."""
    for number, step in enumerate(geometric_steps(LENGTH / 2, LENGTH, count, seed=0)):
        yield Trial(int(step), lost_blocks(rows, 0.5, np.random.default_rng((0, number))))


def batched(workload: LogisticRegression, trials: list[Trial]) -> np.ndarray:
    """Run all trials in the simulator, and return the iteration at which each converges, in fractions."""
    run = trajectory(workload)
    saved_at = last_saved(run.states, workload.blocks, workload.norm, Policy(ranking="full", interval=INTERVAL))
    states = [recovered_state(run.states, workload.blocks, saved_at[t.step], partial, t.step, t.lost) for t in trials]
    starts = [Start(state, trial.step) for state, trial in zip(states, trials, strict=True)]
    counts = iterations_to_criterion(workload, starts, start_as_given, limit=500, jobs=os.cpu_count() or 1)
    return np.array([trial.step for trial in trials]) + counts


def naive(workload: LogisticRegression, trial: Trial) -> float:
    """Run one trial from its beginning in plain numpy."""
    x, y = workload.data.x, workload.data.y
    truth = np.eye(workload.data.classes, dtype=np.float32)[y]
    weights = workload.start()["weights"]
    saved = weights.copy()
    before = np.inf
    for k in range(500):
        if k % INTERVAL == 0:
            saved = weights.copy()
        if k == trial.step:
            weights[trial.lost] = saved[trial.lost]
            before = np.inf  # the loss of another state cannot be interpolated
        now = loss(x @ weights, y)
        if now < workload.criterion:
            return k - 1 + crossing(before, now, workload.criterion)
        before = now
        for first in range(0, len(y), workload.batch):
            rows = slice(first, first + workload.batch)
            weights -= np.float32(workload.rate) * (x[rows].T @ (softmax(x[rows] @ weights) - truth[rows]))
    raise AssertionError("the criterion was not reached")


def agree(some: Sequence[float], others: Sequence[float]) -> bool:
    """Return True if the trials converged at the same iterations, up to rounding."""
    return np.allclose(some, others, rtol=0, atol=ROUNDING)


def softmax(scores: np.ndarray) -> np.ndarray:
    """Return the probabilities of the classes."""
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def loss(scores: np.ndarray, y: np.ndarray) -> float:
    """Return the total cross-entropy."""
    highest = scores.max(axis=1)
    return float(
        (np.log(np.exp(scores - highest[:, None]).sum(axis=1)) + highest - scores[np.arange(len(y)), y]).sum(
            dtype=np.float64
        )
    )


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with mnist/")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--naive", type=int, default=2, help="trials run one at a time in each repeat")
    return parser.parse_args()


if __name__ == "__main__":
    main()
