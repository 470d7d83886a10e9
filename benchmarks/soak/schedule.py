"""Every run of a soak and its strikes as data, drawn from a seed; nothing here touches a process."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

MODELS, WRITERS = ("small", "normed", "wide"), ("overlapped", "blocking")
SLOTS = 14  # strikes that wait for a step; one in the first save and one in the last are added
GAP, MARGIN = 30, 60  # steps from one strike to the next, and after the last
STEPS = (SLOTS * GAP + MARGIN) // 8 * 8
NEAR = 0.05  # seconds: the longest delay of a strike

TRIGGER = "SIGKILL of one worker"
FIRST_SAVE, LAST_SAVE = "SIGKILL during the first save", "SIGKILL in the last save"
LOADER, FULL = "SIGKILL of a loader process", "disk full for a while"
DEADLOCK = "deadlock of a main thread"
DAMAGES = ("cut short", "one byte flipped", "a payload removed", "its manifest a folder", "its manifest a FIFO")
DAMAGED = tuple(f"newest snapshot: {damage}" for damage in DAMAGES)
FAULTS = ("io-error", "enospc", "torn-write", "bit-flip", "lost-rename")
INJECTED = tuple(f"--inject {fault}" for fault in FAULTS)

# The number of cards of each kind in the deck from which strikes are dealt.
DECK = {
    TRIGGER: 4,
    "SIGKILL of two workers at once": 4,
    "SIGKILL of rank 0": 4,
    "SIGKILL of all workers": 3,
    LOADER: 2,
    "SIGKILL of the supervisor": 3,
    "SIGSTOP of a worker": 3,
    DEADLOCK: 3,
    "exception in a worker": 4,
    "SIGTERM to the supervisor": 3,
    "SIGTERM to all processes": 3,
    "SIGTERM to all while workers start": 1,
    "SIGKILL within 50 ms of a restart": 5,
    "SIGKILL during a save": 4,
    "SIGKILL during a restore": 5,
    **dict.fromkeys(DAMAGED, 1),
    FULL: 2,
    "checkpoints away for a while": 2,
}
KINDS = (*DECK, FIRST_SAVE, LAST_SAVE, *INJECTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One strike of `kind`, `delay` seconds after `step` is recorded, at `ranks` (or the first of them).

    A kind with another trigger, such as a save, waits `delay` seconds, or a part of it, after that trigger.
    """

    kind: str
    step: int
    ranks: tuple[int, ...]
    delay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run: its options and its strikes."""

    number: int
    model: str
    workers: int
    loaders: int
    writer: str
    save_every: int
    small_disk: bool  # checkpoints on a separate file system, which can be filled
    fault: str | None  # a storage fault that the command injects at the steps `fault_at`
    fault_at: tuple[int, ...]
    strikes: tuple[Strike, ...]

    @property
    def what(self) -> str:
        """The run in a few words."""
        loading = f"{self.loaders} loader" if self.loaders else "no loader"
        fault = f", --inject {self.fault}" if self.fault else ""
        disk = ", small disk" if self.small_disk else ""
        return f"{self.model}, {self.workers} workers, {loading}, {self.writer}, every {self.save_every}{disk}{fault}"


def plans(seed: int, without: frozenset[str]) -> Iterator[Plan]:
    """Yield runs without end, without the kinds in `without`."""
    draw = random.Random(seed)
    deck: list[str] = []
    number = 0
    while True:
        number += 1
        plan = _bare(number, draw, FULL not in without)
        impossible = without | ({LOADER} if not plan.loaders else set()) | ({FULL} if not plan.small_disk else set())
        kinds = [_dealt(deck, impossible, without, draw) for _ in range(SLOTS)]
        middle = [
            _strike(kind, GAP * (slot + 1) + draw.randrange(GAP // 2), plan, draw) for slot, kind in enumerate(kinds)
        ]
        first = [_strike(FIRST_SAVE, 0, plan, draw)]
        last = [_strike(LAST_SAVE, STEPS, plan, draw)]
        yield replace(plan, strikes=(*first, *middle, *last))


def _bare(number: int, draw: random.Random, mounts: bool) -> Plan:
    """Draw a run without strikes: its model, world size, writer and other options."""
    fault = draw.choice(FAULTS) if number % 3 == 0 else None
    return Plan(
        number=number,
        model=MODELS[number % 3],
        workers=draw.choice((3, 4)),
        loaders=draw.choice((0, 1)),
        writer=draw.choice(WRITERS),
        save_every=draw.choice((3, 5, 8)),
        small_disk=mounts and draw.random() < 0.3,
        fault=fault,
        fault_at=tuple(sorted(draw.sample(range(20, STEPS - MARGIN, 40), 3))) if fault else (),
        strikes=(),
    )


def _dealt(deck: list[str], impossible: frozenset[str] | set[str], without: frozenset[str], draw: random.Random) -> str:
    """Take the next kind that is possible for this run from the deck; impossible kinds stay for the next run."""
    if not any(kind not in impossible for kind in deck):
        fresh = [kind for kind, count in DECK.items() if kind not in without for _ in range(count)]
        draw.shuffle(fresh)
        deck += fresh
    place = next((place for place, kind in enumerate(deck) if kind not in impossible), None)
    return TRIGGER if place is None else deck.pop(place)


def _strike(kind: str, step: int, plan: Plan, draw: random.Random) -> Strike:
    ranks = tuple(draw.sample(range(plan.workers), plan.workers))
    return Strike(kind=kind, step=step, ranks=ranks, delay=draw.uniform(0, NEAR))
