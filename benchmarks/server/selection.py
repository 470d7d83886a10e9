"""Measure the choice of blocks to save, of 10 million on 4 nodes: exchanged histograms against a central ranking.

usage: python benchmarks/server/selection.py [--blocks 10000000] [--nodes 4] [--repeats 7]

Both sides work on the same blocks and take turns within every repeat. Messages are counted, not sent, so the seconds are
those of computation alone. Every choice is compared with `Policy.choose`. Exits with 1 if a claim does not hold.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

import numpy as np

from holdfast.blocks.division import Ids, partition
from holdfast.blocks.policy import BlockChoice, BlockInfo, Policy
from holdfast.server.selection import Ask, Candidates, Selection, exchange

FRACTIONS = (Fraction(1, 4), Fraction(1, 8))
SIDES: dict[str, Callable[[Policy, Fraction, Ask], Selection]] = {
    "exchange": exchange,
    "central": partial(exchange, bins=1 << 40),  # so many that every node lists all its blocks
}
BARE = 8  # bytes a block: its distance alone, sent in a known order
BOUND = "bound: np.partition of all keys"
STEP = 24
Value = TypeVar("Value")


@dataclass
class Cost:
    """The cost of one selection."""

    total: float = 0.0  # seconds of all nodes and the coordinator, one after another
    slowest: float = 0.0  # seconds of the slowest node at each question, and of the coordinator
    to_coordinator: int = 0
    to_nodes: int = 0
    questions: int = 0

    def alone(self, seconds: float) -> None:
        """Add `seconds` of the coordinator."""
        self.total, self.slowest = self.total + seconds, self.slowest + seconds

    def together(self, seconds: Sequence[float]) -> None:
        """Add the `seconds` of the nodes, which work in parallel."""
        self.total, self.slowest = self.total + sum(seconds), self.slowest + max(seconds)


@dataclass
class Measured:
    """The costs of a side in every repeat."""

    costs: list[Cost] = field(default_factory=list)

    def spread(self, name: str) -> str:
        """Format the median and the range of the figure `name`."""
        values = [getattr(cost, name) for cost in self.costs]
        return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    def median(self, name: str) -> float:
        """Return the median of the figure `name`."""
        return statistics.median(getattr(cost, name) for cost in self.costs)


def main() -> int:
    """Measure both fractions, print the tables and whether the claims hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    print(
        f"holdfast {version('holdfast')}, python {platform.python_version()}, numpy {np.__version__}, "
        f"{platform.system()} {platform.release()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}. "
        f"{arguments.blocks:,} blocks on {arguments.nodes} nodes; {arguments.repeats} repeats after one that warmed up; "
        "median (min to max).\n"
    )
    verdicts = [compared(fraction, arguments.blocks, arguments.nodes, arguments.repeats) for fraction in FRACTIONS]
    return 0 if all(verdicts) else 1


def compared(fraction: Fraction, blocks: int, nodes: int, repeats: int) -> bool:
    """Measure both sides at one fraction; return True if every claim holds."""
    rng = np.random.default_rng(12)
    policy, infos = Policy(ranking="priority", interval=STEP, fraction=fraction), random_blocks(blocks, rng)
    owners = partition(blocks, nodes, rng)
    held = [np.flatnonzero(owners == node) for node in range(nodes)]
    parts = [part_of(infos, ids) for ids in held]
    expected = policy.choose(STEP, infos)
    measured = {side: Measured() for side in (*SIDES, BOUND)}
    for repeat in range(repeats + 1):
        for side, choose in SIDES.items():
            cost, choice = selected(choose, policy, held, parts, blocks)
            same = np.array_equal(choice.ids, expected.ids) and choice.credit == expected.credit
            if not same:
                print(f"{side} does not choose the blocks that the policy chooses")
                return False
            if repeat:
                measured[side].costs.append(cost)
        if repeat:
            measured[BOUND].costs.append(partitioned(infos, len(expected.ids)))
    report(fraction, len(expected.ids), measured)
    return claims(measured, blocks)


def random_blocks(blocks: int, rng: np.random.Generator) -> BlockInfo:
    """Return blocks of 1 to 100 values with very unequal distances, a tenth of them 0, saved at 8 different steps."""
    sizes = rng.integers(1, 101, blocks)
    distances = rng.lognormal(sigma=2.0, size=blocks) * (rng.random(blocks) > 0.1)
    return BlockInfo(distances, np.ones(blocks), rng.integers(0, 8, blocks), sizes)


def part_of(infos: BlockInfo, ids: Ids) -> BlockInfo:
    """Return the part of `infos` for the blocks `ids` of one node."""
    return BlockInfo(infos.distances[ids], infos.norms[ids], infos.saved_at[ids], infos.sizes[ids])


def selected(
    choose: Callable[[Policy, Fraction, Ask], Selection],
    policy: Policy,
    held: Sequence[Ids],
    parts: Sequence[BlockInfo],
    blocks: int,
) -> tuple[Cost, BlockChoice]:
    """Make one selection, from the distances on the nodes to the blocks that each saves; return its cost and choice."""
    cost = Cost()
    nodes = on_each(
        cost, [lambda i=i, p=p: Candidates(policy, STEP, i, p, blocks) for i, p in zip(held, parts, strict=True)]
    )
    resumed = time.perf_counter()

    def ask(*question: Any) -> list[Any]:
        nonlocal resumed
        cost.alone(time.perf_counter() - resumed)
        answers = on_each(cost, [lambda node=node: node.answer(*question) for node in nodes])
        cost.questions += 1
        cost.to_nodes += len(nodes) * wire_bytes(question)
        cost.to_coordinator += sum(map(wire_bytes, answers))
        resumed = time.perf_counter()
        return answers

    selection = choose(policy, Fraction(0), ask)
    cost.alone(time.perf_counter() - resumed)
    cost.to_nodes += len(nodes) * wire_bytes(selection.verdict)
    chosen = on_each(cost, [lambda node=node: node.taken(selection.verdict) for node in nodes])
    return cost, BlockChoice(np.sort(np.concatenate(chosen)), selection.credit)


def wire_bytes(message: object) -> int:
    """Return the size of a message in bytes, counting 8 bytes for each number outside arrays."""
    if isinstance(message, np.ndarray):
        return int(message.nbytes)
    return sum(map(wire_bytes, message)) if isinstance(message, tuple) else 8


def on_each(cost: Cost, works: Sequence[Callable[[], Value]]) -> list[Value]:
    """Run the work of every node, one after another, and add the times to `cost`."""
    results, seconds = [], []
    for work in works:
        began = time.perf_counter()
        results.append(work())
        seconds.append(time.perf_counter() - began)
    cost.together(seconds)
    return results


def partitioned(infos: BlockInfo, taken: int) -> Cost:
    """Return the cost of finding the key of the last block, if `taken` were known and no two keys were equal."""
    cost = Cost(to_coordinator=BARE * len(infos.distances))
    began = time.perf_counter()
    np.partition(-infos.distances / np.sqrt(infos.sizes), taken)
    cost.alone(time.perf_counter() - began)
    return cost


def report(fraction: Fraction, chosen: int, measured: dict[str, Measured]) -> None:
    """Print the table of one fraction."""
    print(f"priority at {fraction}, {chosen:,} blocks chosen:\n")
    print(
        "| | seconds, nodes side by side | seconds, one after another | MB to coordinator | bytes to nodes | questions |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    for side, costs in measured.items():
        last = costs.costs[-1]
        print(
            f"| {side} | {costs.spread('slowest')} | {costs.spread('total')} | {last.to_coordinator / 1e6:.3f} "
            f"| {last.to_nodes} | {last.questions} |"
        )
    print()


def claims(measured: dict[str, Measured], blocks: int) -> bool:
    """Print the claims, with the goal of 100 times among them; return True if all hold."""
    ours, theirs = measured["exchange"], measured["central"]
    sent = {side: costs.median("to_coordinator") + costs.median("to_nodes") for side, costs in measured.items()}
    fewer, bare = sent["central"] / sent["exchange"], BARE * blocks / sent["exchange"]
    ratio = ours.median("slowest") / theirs.median("slowest")
    verdicts = [
        (f"exchange sends {fewer:.0f} times fewer bytes than central, 10 at least", fewer >= 10),
        (f"exchange sends {fewer:.0f} times fewer bytes than central, 100 as the goal", fewer >= 100),
        (f"exchange sends {bare:.0f} times fewer bytes than distances alone, 100 as the goal", bare >= 100),
        (f"exchange takes {ratio:.3f} of the seconds of central, 1 allowed", ratio <= 1),
    ]
    for line, holds in verdicts:
        print(f"- {line}: {'holds' if holds else 'DOES NOT HOLD'}")
    print()
    return all(holds for _, holds in verdicts)


if __name__ == "__main__":
    sys.exit(main())
