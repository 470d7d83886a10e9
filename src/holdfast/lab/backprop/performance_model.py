"""The performance model of section IV.C of Nicolae et al. 2022: the predicted cost of a failure, by strategy.

Checkpoint-restart has three overheads: it trains the mini-batches since the last checkpoint again (replay), saves
periodically (checkpoint), and starts workers (restart). Immediate rollback (`replay`) starts workers and trains one
mini-batch again, without saves. `forward` costs nothing. All times are in seconds.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The seconds to train a mini-batch, save a checkpoint, start a worker and load a checkpoint."""

    minibatch: float
    save: float
    init: float  # to start a worker: its process, its device, its model
    load: float  # to load the checkpoint in a worker that has started


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """The seconds that a failure adds to training, by cause."""

    replay: float
    checkpoint: float = 0.0
    restart: float

    @property
    def total(self) -> float:
        return self.replay + self.checkpoint + self.restart


def checkpoint_restart(prices: Prices, *, since: float, saves: int = 0) -> Overhead:
    """Return the cost of a failure `since` mini-batches after the last checkpoint, and of `saves` checkpoints."""
    return Overhead(replay=since * prices.minibatch, checkpoint=saves * prices.save, restart=prices.init + prices.load)


def immediate_rollback(prices: Prices) -> Overhead:
    """Return the cost of a failure after which new workers start and train only the failed mini-batch again."""
    return Overhead(replay=prices.minibatch, restart=prices.init)


def rollback_slowdown(*, point: float, forward: float, backward: float, update: float) -> float:
    """Return the slowdown of a mini-batch that fails at the fraction `point` of its backward pass and runs again.

    `forward`, `backward` and `update` are the seconds that these parts of a mini-batch take. A slowdown of 2 means
    twice the time."""
    return 1 + (forward + point * (backward + update)) / (forward + backward + update)
