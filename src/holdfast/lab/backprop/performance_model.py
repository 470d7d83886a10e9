"""The performance model of section IV.C of "lossy forward recovery": the predicted cost of a failure, by strategy.

Checkpoint-restart has three overheads: it trains the mini-batches since the last checkpoint again (replay), saves
periodically (checkpoint), and starts workers (restart). Immediate rollback (`replay`) starts workers and trains one
mini-batch again, without saves. `forward` costs nothing. All times are in seconds.
"""

from dataclasses import dataclass

from holdfast.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The seconds to train a mini-batch, save a checkpoint, start a worker and load a checkpoint."""

    minibatch: float
    save: float
    init: float  # to start a worker: its process, its device, its model
    load: float  # to load the checkpoint in a worker that has started

    def __post_init__(self) -> None:
        if not (self.minibatch > 0 and min(self.save, self.init, self.load) >= 0):
            raise BadInput(f"prices must be 0 or more, and a mini-batch more than 0 (got {self}).")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """The seconds that a failure adds to training, by cause."""

    replay: float = 0.0
    checkpoint: float = 0.0
    restart: float = 0.0

    @property
    def total(self) -> float:
        return self.replay + self.checkpoint + self.restart


def checkpoint_restart(prices: Prices, *, since: float, saves: float = 0.0) -> Overhead:
    """Return the cost of a failure `since` mini-batches after the last checkpoint, and of `saves` checkpoints."""
    replay = _non_negative("mini-batches since the checkpoint", since) * prices.minibatch
    return Overhead(
        replay=replay, checkpoint=_non_negative("saves", saves) * prices.save, restart=prices.init + prices.load
    )


def mean_checkpoint_restart(prices: Prices, *, epoch: int, saves: float = 0.0) -> Overhead:
    """Return the mean cost of a failure, with a checkpoint every `epoch` mini-batches, and of `saves` checkpoints."""
    return checkpoint_restart(prices, since=_non_negative("mini-batches of an epoch", epoch) / 2, saves=saves)


def immediate_rollback(prices: Prices) -> Overhead:
    """Return the cost of a failure after which new workers start and train only the failed mini-batch again."""
    return Overhead(replay=prices.minibatch, restart=prices.init)


def rollback_slowdown(*, point: float, forward: float, backward: float, update: float) -> float:
    """Return the slowdown of a mini-batch that fails at the fraction `point` of its backward pass and runs again.

    `forward`, `backward` and `update` are the seconds of its parts. A slowdown of 2 means twice the time."""
    if not (0 <= point <= 1 and min(forward, backward, update) >= 0 and forward + backward + update > 0):
        raise BadInput(
            f"a failure must strike at a point in [0, 1] of a mini-batch that takes time (got {point:g}, "
            f"{forward:g} s forward, {backward:g} s backward, {update:g} s update)."
        )
    return 1 + (forward + point * (backward + update)) / (forward + backward + update)


def _non_negative(name: str, value: float) -> float:
    if not 0 <= value < float("inf"):
        raise BadInput(f"{name} must be 0 or more (got {value:g}).")
    return value
