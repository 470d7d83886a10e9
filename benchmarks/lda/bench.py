"""Measure tokens per second of collapsed Gibbs sampling on 20 Newsgroups: holdfast against tomotopy, one thread each.

usage: python benchmarks/lda/bench.py DATA [--sweeps 5] [--repeats 9]      (needs: pip install tomotopy)

Both sample the same tokens into the same 20 topics with priors of 1, and continue from repeat to repeat. holdfast is
measured twice: with one chain, as tomotopy has, and with a full stack of chains, as trials run. Its time includes
rebuilding the word-topic counts before every sweep. Processor time is counted, so that other load on the machine
disturbs less.
"""

import argparse
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import tomotopy

from holdfast.workloads.corpora import Corpus
from holdfast.workloads.gibbs import TOPICS
from holdfast.workloads.lda import LatentDirichletAllocation, lda
from holdfast.workloads.workload import Clock, stacked

Sampler = Callable[[int], None]  # does the given number of sweeps


def main() -> None:
    """Measure all samplers in turn, and print the rates and the claim."""
    arguments = parsed()
    workload = lda("newsgroups20", arguments.data)
    tokens = len(workload.data.words)
    print(f"{tokens:,} tokens, {workload.data.vocabulary:,} words, {len(workload.blocks):,} documents, {TOPICS} topics")
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {versions()}")
    samplers = {
        "tomotopy": (theirs(workload.data), 1),
        "one chain": (ours(workload, 1), 1),
        f"{workload.lanes} chains": (ours(workload, workload.lanes), workload.lanes),
    }
    for sampler, _ in samplers.values():
        sampler(1)  # compile, and fill caches
    rates: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(arguments.repeats):
        for name, (sampler, chains) in samplers.items():
            began = time.process_time()
            sampler(arguments.sweeps)
            rates[name].append(arguments.sweeps * chains * tokens / (time.process_time() - began) / 1e6)
    for name, rate in rates.items():
        ratios = [a / b for a, b in zip(rate, rates["tomotopy"], strict=True)]
        print(f"{name:10} {spread(rate)} M tokens/s, {spread(ratios)} x tomotopy")
    worth = statistics.median(a / b for a, b in zip(rates["one chain"], rates["tomotopy"], strict=True))
    print(f"claim: one chain at least 1.0x: {'holds' if worth >= 1 else 'DOES NOT HOLD'}")


def theirs(data: Corpus) -> Sampler:
    """Return tomotopy's sampler of the corpus, with one worker and fixed priors."""
    model = tomotopy.LDAModel(k=TOPICS, alpha=1.0, eta=1.0, seed=1)
    model.optim_interval = 0
    for document in np.split(data.words, data.bounds[1:-1]):
        model.add_doc([str(word) for word in document])

    def sampler(sweeps: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about results that depend on the number of workers
            model.train(sweeps, workers=1)
        assert model.num_words == len(data.words), "both sides sample the same tokens"

    return sampler


def ours(workload: LatentDirichletAllocation, chains: int) -> Sampler:
    """Return holdfast's sampler with `chains` chains, each with its own random stream."""
    stack = stacked([workload.start()] * chains)
    iteration = np.zeros(chains, dtype=np.int64)

    def sampler(sweeps: int) -> None:
        for _ in range(sweeps):
            stack.update(workload.advance(stack, Clock(iteration, np.arange(chains))))
            np.add(iteration, 1, out=iteration)

    return sampler


def spread(values: list[float]) -> str:
    """Format the median and the range."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def versions() -> str:
    """Return the versions of the libraries."""
    names = ", ".join(f"{name} {version(name)}" for name in ("holdfast", "numba", "numpy", "tomotopy"))
    return f"{names} ({tomotopy.isa})"


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with newsgroups20/")
    parser.add_argument("--sweeps", type=int, default=5, help="sweeps in each repeat")
    parser.add_argument("--repeats", type=int, default=9)
    return parser.parse_args()


if __name__ == "__main__":
    main()
