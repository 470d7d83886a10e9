"""The faults of one schedule: what strikes a process or an operation, how often, and in which phase it did so."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from simulation.scheduler import Dead, World

KINDS = ("crash", "pause", "node freeze", "storage error", "lost answer", "slow storage")
PAUSES = (0.3, 8.0, 8.0, 30.0)  # seconds; nodes that are silent for 5 s are taken for lost
LIMIT = 6  # faults of a schedule
WRITES = ("shard", "extra", "manifest", "latest")
FOCUS = (  # phases in which the faults of a schedule gather; each is a short part of a run
    *(f"overwrite {part}" for part in WRITES if part != "manifest"),
    *(f"remove {part}" for part in WRITES),
    *("create manifest", "create term", "read manifest", "list term", "list snapshot", "post run", "get run"),
)
GATHER = 40.0  # times the rate elsewhere
HAND_OVERS = ("get run", "overwrite shard", "overwrite extra", "create manifest", "create manifest")
OFTEN = 0.3  # the probability that a node freezes there, each time, until one has
LONG = (8.0, 45.0)  # seconds: enough for the others to continue, and perhaps to commit


@dataclass(slots=True, eq=False)
class Faults:
    """Faults that are drawn before and after each operation, with the rates of this schedule.

    A request to the storage takes `slowness` times as long as a message. `struck` counts them by (kind, phase)."""

    world: World
    rates: dict[str, float]
    slowness: float = 1.0
    focus: str = ""
    struck: Counter[tuple[str, str]] = field(default_factory=Counter)
    left: int = LIMIT
    hand_over: str = (
        ""  # a phase in which a node freezes, so that the others continue without it in the midst of a save
    )
    freeze: Callable[[int, float], None] = lambda node, seconds: None  # pauses all processes of a node

    @classmethod
    def drawn(cls, world: World) -> "Faults":
        """Return faults of a random mixture of kinds; some schedules have many faults, and some none."""
        rng = world.rng
        scale = rng.choice((0.0, 1.0, 1.0, 3.0, 10.0))
        rates = {kind: scale * rng.choice((0.0, 0.001, 0.004)) for kind in KINDS}
        focus = rng.choice(("", *FOCUS))
        hand_over = rng.choice(HAND_OVERS) if rng.random() < 0.5 else ""
        slowness = rng.choice((1.0, 1.0, 10.0, 50.0))
        return cls(world, rates, slowness, focus, left=rng.randint(1, LIMIT), hand_over=hand_over)

    def strike(self, kind: str, phase: str) -> bool:
        """Return True if a fault of `kind` strikes now, in the phase `phase` of the run."""
        rate = self.rates.get(kind, 0.0) * (GATHER if phase == self.focus else 1.0)
        if self.left <= 0 or self.world.rng.random() >= rate:
            return False
        self.count(kind, phase)
        return True

    def count(self, kind: str, phase: str) -> None:
        self.left -= 1
        self.struck[kind, phase] += 1
        self.world.record(f"FAULT {kind} in {phase}")

    def point(self, phase: str) -> None:
        """Let a fault strike the process that runs now: it may be killed or paused here."""
        process = self.world.process
        if self.strike("crash", phase):
            process.is_dead = True
            raise Dead
        if self.strike("pause", phase):
            process.paused_until = self.world.now + self._pause()
        if self.strike("node freeze", phase):
            self.freeze(process.node, self._pause())
        if phase == self.hand_over and self.left > 0 and self.world.rng.random() < OFTEN:
            self.hand_over = ""
            self.count("node freeze", phase)
            self.freeze(process.node, self.world.rng.uniform(*LONG))
        if process.paused_until > self.world.now:
            self.world.sleep(0.0)  # the pause begins here, before the operation takes effect

    def after(self, phase: str) -> None:
        """Let a worker lose its connection once its request has taken effect: it never learns of that, and ends."""
        process = self.world.process
        if "supervisor" not in process.name and self.rates.get("lost answer") and self.strike("lost answer", phase):
            process.is_dead = True
            raise Dead

    def _pause(self) -> float:
        return self.world.rng.choice(PAUSES) * self.world.rng.uniform(0.5, 1.5)
