"""Measure the seconds per iteration of matrix factorization: holdfast against implicit, and against scipy and numpy.

usage: python benchmarks/mf/bench.py DATA [--repeats 9]        (needs: pip install implicit)

All sides use one thread, the same ratings and the same number of factors, and take turns within every repeat; none
computes a loss. README.md describes the differences between the sides. Exits with 1 if a claim does not hold.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import scipy.sparse
from implicit.cpu.als import AlternatingLeastSquares
from threadpoolctl import threadpool_limits

from holdfast.workloads.mf import MatrixFactorization, mf
from holdfast.workloads.workload import Clock, stacked

ITERATIONS = 3  # per side and repeat
STACK, ALONE, SCIPY, EXACT = "holdfast, in a stack", "holdfast, alone", "scipy, the same iteration", "scipy, exact"
IMPLICIT = {
    "implicit, 3 CG steps": {"use_cg": True, "dtype": np.float64},
    "implicit, 3 CG steps, float32": {"use_cg": True, "dtype": np.float32},
    "implicit, exact": {"use_cg": False, "dtype": np.float64},
}
# Each claim: a side, and the sides of which it is at least as fast as the fastest.
CLAIMS = [(STACK, tuple(IMPLICIT)), (ALONE, tuple(IMPLICIT)), (STACK, (SCIPY,))]

Step = Callable[[scipy.sparse.csr_matrix, np.ndarray, np.ndarray], np.ndarray]


def main() -> int:
    """Measure both data sets, print the tables and whether the claims hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with movielens/ and jester/")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    packages = ("holdfast", "implicit", "numba", "numpy", "scipy")
    print(f"python {sys.version.split()[0]}, " + ", ".join(f"{name} {version(name)}" for name in packages))
    with threadpool_limits(1):
        verdicts = [compared(mf(name, arguments.data), arguments.repeats) for name in ("movielens", "jester")]
    return 0 if all(verdicts) else 1


def compared(workload: MatrixFactorization, repeats: int) -> bool:
    """Measure all sides on one data set; return True if every claim holds."""
    matrix = zero_filled(workload)
    check(workload, matrix)
    sides = contestants(workload, matrix)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(repeats + 1):
        for side, seconds in sides.items():
            measured = seconds()
            if repeat:  # the first round compiles and warms caches
                times[side].append(measured)
    report(workload, matrix, times)
    verdicts = [claim(times, ours, others) for ours, others in CLAIMS]  # print them all before judging
    return all(verdicts)


def contestants(workload: MatrixFactorization, matrix: scipy.sparse.csr_matrix) -> dict[str, Callable[[], float]]:
    """Return each side as a function that runs a few iterations and returns the seconds of one."""
    return {
        STACK: lambda: holdfast(workload, workload.lanes) / workload.lanes,
        ALONE: lambda: holdfast(workload, 1),
        **{name: lambda settings=settings: implicit(workload, matrix, settings) for name, settings in IMPLICIT.items()},
        SCIPY: lambda: plain(workload, matrix, coordinate_wise),
        EXACT: lambda: plain(workload, matrix, exact),
    }


def holdfast(workload: MatrixFactorization, trials: int) -> float:
    """Time holdfast's iteration of a stack of `trials` trials."""
    stack, clock = stacked([workload.start()] * trials), Clock(np.zeros(trials, int), np.zeros(trials, int))
    began = time.perf_counter()
    for _ in range(ITERATIONS):
        stack = workload.advance(stack, clock)
    return (time.perf_counter() - began) / ITERATIONS


def implicit(workload: MatrixFactorization, matrix: scipy.sparse.csr_matrix, settings: dict[str, object]) -> float:
    """Time implicit's iteration by its own clock, without its preparation before the first one."""
    seconds: list[float] = []
    model = AlternatingLeastSquares(
        factors=workload.factors, iterations=ITERATIONS, regularization=0.0, num_threads=1, random_state=0, **settings
    )
    model.fit(
        matrix.astype(settings["dtype"]),
        show_progress=False,
        callback=lambda iteration, elapsed, loss: seconds.append(elapsed),
    )
    return statistics.mean(seconds)


def plain(workload: MatrixFactorization, matrix: scipy.sparse.csr_matrix, step: Step) -> float:
    """Time an iteration written with scipy and numpy."""
    state, transposed = workload.start(), matrix.T.tocsr()
    left, right = state["L"], state["R"]
    began = time.perf_counter()
    for _ in range(ITERATIONS):
        left = step(matrix, left, right)
        right = step(transposed, right, left)
    return (time.perf_counter() - began) / ITERATIONS


def coordinate_wise(matrix: scipy.sparse.csr_matrix, x: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Return one half of our iteration: each column of x by least squares, with the other columns fixed."""
    target, gram, x = matrix @ given, given.T @ given, x.copy()
    for k in range(x.shape[1]):
        x[:, k] += (target[:, k] - x @ gram[:, k]) / gram[k, k]
    return x


def exact(matrix: scipy.sparse.csr_matrix, x: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Solve for all of x at once, whatever its value was."""
    return np.linalg.solve(given.T @ given, (matrix @ given).T).T


def zero_filled(workload: MatrixFactorization) -> scipy.sparse.csr_matrix:
    """Return the ratings as a sparse matrix of scipy."""
    data = workload.data
    return scipy.sparse.csr_matrix((data.values, (data.rows, data.columns)), shape=(data.users, data.items))


def check(workload: MatrixFactorization, matrix: scipy.sparse.csr_matrix) -> None:
    """Check that our iteration and the one with scipy give the same numbers."""
    state, clock = workload.start(), Clock(np.zeros(1, int), np.zeros(1, int))
    ours = workload.advance(stacked([state]), clock)
    left = coordinate_wise(matrix, state["L"], state["R"])
    right = coordinate_wise(matrix.T.tocsr(), state["R"], left)
    assert np.allclose(ours["L"][..., 0], left), "the same iteration"
    assert np.allclose(ours["R"][..., 0], right), "the same iteration"


def iterations_to_criterion(workload: MatrixFactorization, matrix: scipy.sparse.csr_matrix, step: Step) -> int:
    """Return the number of iterations of kind `step` to the criterion."""
    state, transposed = workload.start(), matrix.T.tocsr()
    left, right = state["L"], state["R"]
    for count in range(1000):
        if workload.loss(stacked([{"L": left, "R": right}]))[0] < workload.criterion:
            return count
        left = step(matrix, left, right)
        right = step(transposed, right, left)
    raise AssertionError("the criterion was not reached")


def report(workload: MatrixFactorization, matrix: scipy.sparse.csr_matrix, times: dict[str, list[float]]) -> None:
    """Print the table of one data set."""
    data = workload.data
    print(
        f"\n{workload.name}: {data.users} users, {data.items} items, {len(data.values)} ratings, "
        f"{workload.factors} factors; loss {workload.criterion:g} takes "
        f"{iterations_to_criterion(workload, matrix, coordinate_wise)} coordinate-wise iterations, "
        f"{iterations_to_criterion(workload, matrix, exact)} exact ones\n"
    )
    print("| ms per iteration | median | min | max |\n|---|---:|---:|---:|")
    for side, seconds in times.items():
        print(
            f"| {side} | {1e3 * statistics.median(seconds):.1f} | {1e3 * min(seconds):.1f} | {1e3 * max(seconds):.1f} |"
        )
    print()


def claim(times: dict[str, list[float]], ours: str, others: tuple[str, ...]) -> bool:
    """Return True if the median of `ours` is at most that of the fastest of `others`."""
    fastest = min(others, key=lambda side: statistics.median(times[side]))
    ratio = statistics.median(times[fastest]) / statistics.median(times[ours])
    print(
        f"claim: {ours!r} at least as fast as {fastest!r}: {ratio:.1f}x, {'holds' if ratio >= 1 else 'DOES NOT HOLD'}"
    )
    return ratio >= 1


if __name__ == "__main__":
    sys.exit(main())
