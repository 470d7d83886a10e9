"""What one failure costs each strategy, predicted: the performance model of section IV.C of "lossy forward recovery".

Checkpoint-restart pays three overheads: the mini-batches since the last checkpoint again (replay), what periodic saves
add (checkpoint), and starting again (restart). Immediate rollback (`replay`) restarts and replays one mini-batch, and
saves nothing. `forward` pays nothing, or a restart for the workers that join. Seconds come in as numbers.
"""

from dataclasses import dataclass

from holdfast.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Seconds that the parts of a training take, on the machine that it runs on."""

    minibatch: float
    save: float
    init: float  # a worker starts: its process, its device, its model
    load: float  # a worker that has started reads the checkpoint

    def __post_init__(self) -> None:
        if not (self.minibatch > 0 and min(self.save, self.init, self.load) >= 0):
            raise BadInput(f"no training costs {self}: give seconds of 0 or more, and a mini-batch more than 0")

    @property
    def restart(self) -> float:
        """From nothing to a model that can go on from a checkpoint."""
        return self.init + self.load


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Seconds that training takes longer, by cause."""

    replay: float = 0.0
    checkpoint: float = 0.0
    restart: float = 0.0

    @property
    def total(self) -> float:
        return self.replay + self.checkpoint + self.restart


def checkpoint_restart(prices: Prices, *, since: float, saves: float = 0.0) -> Overhead:
    """A failure so many mini-batches after the last checkpoint; `saves` is how many saves a failure has to bear."""
    replay = _count("mini-batches since the checkpoint", since) * prices.minibatch
    return Overhead(replay=replay, checkpoint=_count("saves", saves) * prices.save, restart=prices.restart)


def mean_checkpoint_restart(prices: Prices, *, epoch: int, saves: float = 0.0) -> Overhead:
    """A failure at a random moment, with a checkpoint at the end of every epoch: half an epoch again on average."""
    return checkpoint_restart(prices, since=_count("mini-batches of an epoch", epoch) / 2, saves=saves)


def immediate_rollback(prices: Prices, *, spares: bool = False) -> Overhead:
    """One mini-batch again, after replacements have started; spares have started already."""
    return Overhead(replay=prices.minibatch, restart=0.0 if spares else prices.init)


def lossy_forward(prices: Prices, *, joining: bool = False) -> Overhead:
    """Nothing; workers that join the survivors have to start, and training need not wait for them."""
    return Overhead(restart=prices.init if joining else 0.0)


def rollback_slowdown(*, point: float, forward: float, backward: float, update: float) -> float:
    """How often its own time a mini-batch takes that fails at a point of backward and runs again.

    The failed part is its forward, and backward and updates up to the point; so it is more than 1 and at most 2.
    """
    if not (0 <= point <= 1 and min(forward, backward, update) >= 0 and forward + backward + update > 0):
        raise BadInput(f"no mini-batch of {forward:g}, {backward:g} and {update:g} s fails at {point:g} of backward")
    return 1 + (forward + point * (backward + update)) / (forward + backward + update)


def _count(what: str, value: float) -> float:
    if not 0 <= value < float("inf"):
        raise BadInput(f"{value:g} {what} cannot be: give 0 or more")
    return value
