"""A run that is fed by a loader of the script's own, one that can say where it is and go on from there, such as
torchdata's StatefulDataLoader.

Every rank has its own. A step takes the next batch of it, or the next few if they are accumulated, and takes none
ahead: at a boundary the loader is just after the last batch that was trained. Where it is then is saved for every rank.
The run counts these batches, and knows nothing of their samples.

Windows whose samples the script draws itself, as from random offsets into a text.

The run counts them, and keys the generators before every one: a window that is trained again draws the same samples,
with as many ranks. Which samples those are, nobody but the script knows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from holdfast.errors import BadInput, Corrupt
from holdfast.train.data.loader import Loaded, LoadRequest
from holdfast.train.state import plain_values, rng
from holdfast.train.state.restore import RestoredState

LONG = 1 << 20  # windows that an epoch has: whichever there are, so that a run can be extended


class Draws:
    """Stands for so many samples of which the run knows nothing but that they are to be drawn."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


LOADER = "loader"
DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
ELSEWHERE = (
    "the loader of this run has processes of its own, and what they draw at random is not saved with its position: if they "
    "augment samples at random, a resumed run is not exact. Then give it num_workers=0, or augment in the loop"
)


class Loader(Protocol):
    """What can feed a run: it is iterated over once an epoch, says where it is, and goes on from there."""

    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Feed:
    """The batches of a loader one after the other; where it ends, it is iterated over anew."""

    def __init__(self, loader: Loader) -> None:
        if lacking := [name for name in ("__iter__", "state_dict", "load_state_dict") if not hasattr(loader, name)]:
            raise BadInput(
                f"a {type(loader).__name__} lacks {' and '.join(lacking)}, so where it is cannot be saved: give "
                "torchdata's StatefulDataLoader, or give its dataset to run.batches"
            )
        _check_sampler(loader)
        self.loader = loader
        self._epoch = 0
        self._batches: Iterator[Any] | None = None
        _tell_epoch(loader, 0)

    def go_on(self, restored: RestoredState, rank: int, world: int) -> None:
        """Go on from where this rank's loader was when the state was saved that came back, if one did."""
        if restored.step is None:
            return
        if not restored.positions:
            raise BadInput(
                f"the snapshot of step {restored.step} does not say where a loader was: it was trained without "
                "run.stream. Train it as before, or name another folder"
            )
        if len(restored.positions) != world:
            raise BadInput(
                f"this run is fed by the loaders of {len(restored.positions)} ranks, and where they are is of no use to "
                f"{world}: go on with {len(restored.positions)} workers, or name another folder"
            )
        try:
            self._epoch, text = restored.positions[rank]
            state = plain_values.decode(LOADER, text)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Corrupt(
                f"the snapshot of step {restored.step} does not say where the loader of rank {rank} was ({error!r:.200})"
            ) from error
        _tell_epoch(self.loader, self._epoch)
        self.loader.load_state_dict(state)

    @property
    def caveat(self) -> str | None:
        """What may not come back exactly, if anything."""
        return ELSEWHERE if getattr(self.loader, "num_workers", 0) else None

    def position(self) -> tuple[int, str]:
        """Where the loader is: in which epoch, and where in it as text."""
        text = plain_values.encode(LOADER, self.loader.state_dict())
        if len(text) > plain_values.MAX_BYTES:
            raise BadInput(
                f"where the loader is takes {len(text)} bytes to say, and may take {plain_values.MAX_BYTES}: its state_dict must be small"
            )
        return self._epoch, text

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = iter(self.loader)
        for batch in self._batches:
            return batch
        self._epoch += 1
        _tell_epoch(self.loader, self._epoch)
        self._batches = iter(self.loader)
        for batch in self._batches:
            return batch
        raise BadInput(
            f"the loader ended in its epoch {self._epoch - 1} and has no batches when it is iterated over anew: give fewer "
            "steps, or a loader that begins again"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Streamed:
    """Takes this rank's next batches, so many for a window.

    The generators are keyed before, for a loader that draws from them, and again for training: a loader that has just
    gone on from a saved position has drawn other numbers to get there.
    """

    dataset: Draws
    parts: int
    feed: Feed

    def __getitem__(self, request: LoadRequest) -> Loaded:
        rng.set_all(request.key)
        batches = [next(self.feed) for _ in range(self.parts)]
        rng.set_all(request.key)
        return request, batches

    def position(self) -> tuple[int, str]:
        return self.feed.position()


def _check_sampler(loader: Any) -> None:
    """Refuse a sampler whose order does not come back, since torchdata takes any.

    PyTorch's own that draw do not say where they are. And where loader and sampler share a generator, the loader draws a
    seed between two shuffles, which it does not draw again when it goes on from a position: the next epoch would differ.
    """
    if not isinstance(loader, DataLoader):
        return
    batches = loader.batch_sampler
    for sampler in (loader.sampler, getattr(batches, "sampler", None)):
        if isinstance(sampler, DRAWING) and not hasattr(sampler, "state_dict"):
            raise BadInput(
                f"PyTorch's {type(sampler).__name__} does not say where it is, and would begin another order after a restart: "
                "use torchdata's RandomSampler (torchdata.stateful_dataloader.sampler), or shuffle=True"
            )
    if loader.generator is not None and loader.generator is getattr(loader.sampler, "generator", None):
        raise BadInput(
            "a generator that the loader shares with its sampler does not come back exactly: give it to the sampler alone, "
            "as in StatefulDataLoader(data, sampler=RandomSampler(data, generator=g)) with torchdata's RandomSampler"
        )


def _tell_epoch(loader: Any, epoch: int) -> None:
    """Tell whatever shuffles by the number of its epoch, as PyTorch's DistributedSampler does."""
    batches = getattr(loader, "batch_sampler", None)
    for each in (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None), _data(loader)):
        if callable(tell := getattr(each, "set_epoch", None)):
            tell(epoch)


def _data(loader: Any) -> Any:
    return getattr(loader, "dataset", None)
