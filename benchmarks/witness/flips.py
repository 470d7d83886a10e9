"""Flipped bits: whether a run finds each, names its rank, and ends with the bits of a run without flips."""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from runs import claim_holds, run

from holdfast.audit.verdicts import audit_run
from holdfast.checkpoint import snapshot
from holdfast.checkpoint.store import DirectoryStore
from holdfast.history.log import read_history

SMALL = {"width": 64, "layers": 3, "batch": 24}
EXPONENT, MANTISSA = range(23, 31), range(23)  # bits of float32


@dataclass(frozen=True)
class PlannedFlip:
    """A bit to flip: of a weight or a moment, in the exponent or the mantissa."""

    step: int
    rank: int
    what: str
    part: str
    bit: int

    @property
    def spec(self) -> str:
        return f"flip@{self.step}:{self.what}={self.bit},rank={self.rank}"


@dataclass(frozen=True)
class Outcome:
    """What became of a flip: the comparison that found it, the steps until then, and whether the rank was named."""

    flip: PlannedFlip
    kind: str
    changed: str
    steps: int | None
    named: str | None  # at once, or after the steps were repeated


def plan_flips(count: int, every: int, workers: int, draw: random.Random) -> list[PlannedFlip]:
    """Return `count` flips, each in an interval of its own, with an interval without a flip between two."""
    flips = []
    for number in range(count):
        what, part = ("weight", "moment")[number % 2], ("exponent", "mantissa")[number // 2 % 2]
        step = (2 * number + 1) * every + draw.randrange(every)
        bit = draw.choice(EXPONENT if part == "exponent" else MANTISSA)
        flips.append(PlannedFlip(step, draw.randrange(workers), what, part, bit))
    return flips


def events(out: Path, kind: str) -> list[Any]:
    return [event.what for event in read_history(out).events if event.kind == kind]


def outcomes(out: Path, kind: str, every: int, flips: Sequence[PlannedFlip]) -> list[Outcome]:
    """Return what became of each flip, by the history of the run and its audit."""
    because = next(finding.because for finding in audit_run(out) if finding.check == "no_corruption_remains")
    strikes = {strike.step: strike for strike in events(out, "failure")}
    corruptions = events(out, "corruption")
    results = []
    for flip in flips:
        strike = strikes[flip.step]
        found = next((c for c in corruptions if c.attempt == strike.attempt and flip.step < c.step), None)
        named = None
        if found and found.culprit == flip.rank:
            named = "at once"
        elif found and flip.rank in found.ranks:
            claim = f"before step {found.step} of attempt {found.attempt} (the shard of rank {flip.rank} was wrong"
            named = "after the repetition" if claim in because else None
        results.append(Outcome(flip, kind, strike.changed or "", found and found.step - flip.step, named))
    return results


def same_bits(one: Path, other: Path) -> bool:
    """Return True if the newest snapshots of two runs have the same bits."""
    a, b = (snapshot.newest(DirectoryStore(out / "checkpoints")).tensors for out in (one, other))
    return a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name])) for name in a)


def measure_flips(task: argparse.Namespace, folder: Path) -> bool:
    draw = random.Random(task.seed)
    print(f"seed {task.seed}, {task.workers} workers, --witness-every {task.every}")
    rows: list[Outcome] = []
    same: dict[str, bool] = {}
    settings = {**SMALL, "device": task.device}
    for kind in task.kinds:
        flips = plan_flips(task.count // len(task.kinds), task.every, task.workers, draw)
        steps = (2 * len(flips) + 1) * task.every
        saving = ["--save-every", str(2 * task.every), "--max-restarts", "9"]
        run(folder / f"{kind}-reference", kind, task.workers, None, steps, saving, **settings)
        injected = [word for flip in flips for word in ("--inject", flip.spec)]
        output = run(folder / kind, kind, task.workers, task.every, steps, [*saving, *injected], **settings)
        if "audit: pass" not in output:
            raise SystemExit(f"the audit did not pass:\n{output}")
        rows += outcomes(folder / kind, kind, task.every, flips)
        same[kind] = same_bits(folder / kind, folder / f"{kind}-reference")
    for row in rows:
        verdict = f"found after {row.steps} steps, named {row.named}" if row.steps else "not found"
        print(f"{row.kind} {row.flip.spec} ({row.flip.part}: {row.changed}): {verdict}")
    print("\n| | flips | found | most steps | rank named at once | after the repetition | not found |")
    print("|---|---|---|---|---|---|---|")
    for kind in task.kinds:
        for part in (f"{what}, {half}" for what in ("weight", "moment") for half in ("exponent", "mantissa")):
            own = [row for row in rows if row.kind == kind and part == f"{row.flip.what}, {row.flip.part}"]
            found = [row.steps for row in own if row.steps]
            by = [sum(row.named == how for row in own) for how in ("at once", "after the repetition")]
            print(
                f"| {kind}, {part} | {len(own)} | {len(found)} | {max(found, default='')} | {by[0]} | {by[1]} | "
                f"{len(own) - len(found)} |"
            )
    print()
    in_time = all(row.steps is not None and row.steps <= task.every for row in rows)
    return all(
        [
            claim_holds(f"all {len(rows)} flips are found within {task.every} steps", in_time),
            claim_holds("the rank of each is named", all(row.named for row in rows)),
            *(claim_holds(f"{kind}: the bits of a run without flips", is_same) for kind, is_same in same.items()),
        ]
    )
