"""The order in which a script's own sampler returned the samples of each epoch, as the ranks recorded it."""

from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np

from holdfast.audit.rank_session import RankSession
from holdfast.audit.step_columns import Numbers
from holdfast.errors import Corrupt
from holdfast.events import Order
from holdfast.finding import CannotTell
from holdfast.sampler import orders


class RecordedOrders:
    """The sample orders that a sampler returned for the epochs of one training phase, as the ranks recorded them.

    `digest` is the planned digest of the first epoch's order. `errors` has a message for each recorded order that
    differs from an earlier record of the same epoch, or from `digest`."""

    def __init__(self, sessions: Iterable[RankSession], samples: int, digest: str, epochs: range) -> None:
        self.digest, self._first = digest, epochs.start
        self.errors: list[str] = []
        self._orders: dict[int, tuple[RankSession, Numbers]] = {}
        for session in sessions:
            for epoch, order in _read(session, samples):
                if epoch in epochs:
                    self._add(session, epoch, order)

    @property
    def epochs(self) -> frozenset[int]:
        """The epochs with a recorded order, counted from 0 at the start of the phase."""
        return frozenset(epoch - self._first for epoch in self._orders)

    def of(self, epoch: int) -> Numbers:
        """Return all sample ids of `epoch` in training order; raise CannotTell if no rank recorded them."""
        if (recorded := self._orders.get(self._first + epoch)) is None:
            raise CannotTell(f"the history does not hold the order that the sampler returned for epoch {epoch}")
        return recorded[1]

    def _add(self, session: RankSession, epoch: int, order: Numbers) -> None:
        first, before = self._orders.setdefault(epoch, (session, order))
        if not np.array_equal(before, order):
            who = f"{first.who} in attempt {first.attempt} and {session.who} in attempt {session.attempt}"
            self.errors.append(
                f"the sampler returned other orders of epoch {epoch} to {who}: an order may depend on the epoch, the seed "
                "and the global random generators, and on nothing else"
            )
        elif epoch == self._first and orders.digest(order) != self.digest:
            self.errors.append(
                f"{session.who} recorded another order of epoch 0 in attempt {session.attempt} than planned"
            )


def _read(session: RankSession, samples: int) -> Iterator[tuple[int, Numbers]]:
    """Yield (epoch, sample ids in training order) for each epoch whose order the process recorded completely.

    An order is complete when it has `samples` ids."""
    for epoch, group in groupby(session.orders, key=lambda piece: piece.epoch):
        pieces: list[Numbers] = []
        for piece in group:
            if piece.first == 0:
                pieces = []  # recorded again, after a change of the members
            if piece.first != sum(map(len, pieces)):
                raise CannotTell(f"{session.who} recorded an order of epoch {epoch} of which a piece is missing")
            pieces.append(_ids(session, piece))
            if sum(map(len, pieces)) == samples:
                yield epoch, np.concatenate(pieces)


def _ids(session: RankSession, piece: Order) -> Numbers:
    try:
        return orders.read_piece(piece.width, piece.indices)
    except Corrupt as error:
        raise CannotTell(
            f"{session.who} recorded an order of epoch {piece.epoch} that cannot be read: {error}"
        ) from error
