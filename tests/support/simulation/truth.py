"""What must hold at every moment of a schedule, checked whenever an object in the store changes.

A snapshot is committed by one object, its manifest. At that moment all of its parts are there. The newest good snapshot
is never lost, and no part of a committed snapshot changes. Only one term commits at a time: once a newer term has
committed, an older one does not. A term has one owner.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO

from holdfast.checkpoint import manifest, snapshot
from holdfast.checkpoint.store import Reader, Store
from holdfast.checkpoint.terms import Term
from holdfast.errors import HoldfastError
from simulation.objects import Bucket
from simulation.scheduler import Violation, World

_PART = re.compile(r"(step-(\d+)(?:-term-\d+)?)/(.+)")
_MANIFEST = "manifest.json"


class _Plain:
    """A store that reads a bucket at once, without requests."""

    def __init__(self, values: Mapping[str, bytes]) -> None:
        self._values = values

    def owns(self, term: int) -> bool:
        return False

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self._values if name.startswith(prefix))

    @contextmanager
    def open(self, name: str) -> Iterator[Reader]:
        if name not in self._values:
            raise FileNotFoundError(name)
        value = self._values[name]

        def read_at(offset: int, buffer: memoryview) -> int:
            part = value[offset : offset + len(buffer)]
            buffer[: len(part)] = part
            return len(part)

        yield Reader(len(value), BytesIO(value).readinto, read_at)


def plain(bucket: Bucket) -> Store:
    """Return a store that reads `bucket` at once."""
    return _Plain(bucket.values)  # type: ignore[return-value]  # nothing is written


def _is_whole(values: Mapping[str, bytes], step: int) -> bool:
    try:
        snapshot.check(_Plain(values), step)  # type: ignore[arg-type]  # nothing is written
    except HoldfastError:
        return False
    return True


@dataclass(slots=True, eq=False)
class Truth:
    """The committed snapshots of a bucket, and all violations so far."""

    world: World
    bucket: Bucket
    keep_last: int
    violations: list[Violation] = field(default_factory=list)
    good: dict[str, int] = field(default_factory=dict)  # the steps of committed snapshots, by folder
    terms: dict[str, int] = field(default_factory=dict)  # by process
    owners: dict[int, Term] = field(default_factory=dict)
    _newest: int = 0  # the newest term that has committed

    def __post_init__(self) -> None:
        self.bucket.watch = self._watch

    def take(self, term: Term) -> None:
        """Check that no other group of nodes owns `term`."""
        owner = self.owners.setdefault(term.number, term)
        if owner.token != term.token:
            self.violated(f"term {term.number} belongs to the nodes {owner.nodes} and to {term.nodes}")

    def restored(self, step: int | None) -> None:
        """Check that no newer snapshot than `step` was committed before the process that restored it ends its restore."""
        if self.terms[self.world.process.name] < self._newest:
            return  # other nodes continued without it
        if newer := [other for other in self.good.values() if other > (-1 if step is None else step)]:
            self.violated(f"{self.world.process.name} restored {step}, though step {max(newer)} was committed")

    def violated(self, what: str) -> None:
        self.world.record(f"VIOLATION {what}")
        self.violations.append(Violation(what))
        self.world.stop()

    def is_good(self, step: int) -> bool:
        """Return True if the newest snapshot of `step` is complete."""
        return _is_whole(self.bucket.values, step)

    def _watch(self, verb: str, name: str) -> None:
        match = _PART.fullmatch(name)
        if match is None:
            return
        folder, step = match[1], int(match[2])
        own = {name: value for name, value in self.bucket.values.items() if name.startswith(f"{folder}/")}
        if verb == "create" and match[3] == _MANIFEST:
            if not manifest.is_closed(own[name]):
                self._committed(folder, step, own)
        elif folder in self.good and not _is_whole(own, step):
            self._lost(folder, verb, name)

    def _committed(self, folder: str, step: int, own: Mapping[str, bytes]) -> None:
        term = self.terms.get(self.world.process.name, 0)
        if not _is_whole(own, step):
            self.violated(f"the snapshot of step {step} was committed without all of its parts")
            return
        if term < self._newest:
            self.violated(f"term {term} committed step {step} after term {self._newest} had committed")
        self._newest = max(term, self._newest)
        self.good[folder] = step

    def _lost(self, folder: str, verb: str, name: str) -> None:
        step = self.good.pop(folder)
        newer = len({other for other in self.good.values() if other > step})
        who = self.world.process.name
        if name.endswith(_MANIFEST) and verb == "remove":
            if newer < self.keep_last:
                self.violated(f"{who} removed step {step}, though only {newer} newer snapshots are good")
        else:
            self.violated(f"{who} damaged the committed snapshot of step {step}: {verb} {name}")
