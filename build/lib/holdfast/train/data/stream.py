"""Runs whose samples holdfast counts but does not choose: from a stateful loader, or drawn by the script.

With `run.stream` every rank has a loader of its own, such as torchdata's StatefulDataLoader. A step takes only its own
batches from the loader, and none ahead. So at a step boundary the loader is just after the last trained batch, and that
position is saved for every rank.

With `run.steps` the script draws its samples. The random generators are seeded before every step, so a step that is
trained again with the same world size draws the same samples.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from holdfast.errors import BadInput, Corrupt
from holdfast.train.data.loader import Loaded, LoadRequest
from holdfast.train.state import plain_values, rng
from holdfast.train.state.restore import RestoredState

LONG = 1 << 20  # steps in an epoch, more than a run has, so that it can be extended


class OwnSamples:
    """A placeholder dataset for `count` samples that the script obtains itself. Each item is its own index."""

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
    "the loader of this run has worker processes, and their random generators are not saved with its position: if they "
    "augment samples at random, a resumed run is not exact. Then give it num_workers=0, or augment in the loop."
)


class Loader(Protocol):
    """A data loader that can feed a run: it has state_dict and load_state_dict, and is iterated over once per epoch."""

    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class LoaderBatches:
    """An endless iterator over the batches of a loader. When an epoch of the loader ends, its next epoch begins."""

    def __init__(self, loader: Loader) -> None:
        if lacking := [name for name in ("__iter__", "state_dict", "load_state_dict") if not hasattr(loader, name)]:
            raise BadInput(
                f"a {type(loader).__name__} lacks {' and '.join(lacking)}, so its position cannot be saved: give "
                "torchdata's StatefulDataLoader, or give its dataset to run.batches."
            )
        _check_sampler(loader)
        self.loader = loader
        self._epoch = 0
        self._batches: Iterator[Any] | None = None
        _set_epoch(loader, 0)

    def resume(self, restored: RestoredState, rank: int, world: int) -> None:
        """Set the loader to its position in the restored snapshot, if there is one.

        `rank` and `world` are this process's rank and the world size, which must be the same as in the snapshot."""
        if restored.step is None:
            return
        if not restored.positions:
            raise BadInput(
                f"the snapshot of step {restored.step} holds no position of a loader: it was trained without run.stream. "
                "Train it as before, or name another folder."
            )
        if len(restored.positions) != world:
            raise BadInput(
                f"this run was saved with the loaders of {len(restored.positions)} ranks, and there are {world} now: "
                f"resume with {len(restored.positions)} workers, or name another folder."
            )
        try:
            self._epoch, text = restored.positions[rank]
            state = plain_values.decode(LOADER, text)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Corrupt(
                f"the snapshot of step {restored.step} lacks the position of rank {rank}'s loader ({error!r:.200})."
            ) from error
        _set_epoch(self.loader, self._epoch)
        self.loader.load_state_dict(state)

    @property
    def caveat(self) -> str | None:
        """A warning if the loader's position may not be restored exactly, otherwise None."""
        return ELSEWHERE if getattr(self.loader, "num_workers", 0) else None

    def position(self) -> tuple[int, str]:
        """Return the position of the loader: the number of its epoch, and its state_dict as text."""
        text = plain_values.encode(LOADER, self.loader.state_dict())
        if len(text) > plain_values.MAX_BYTES:
            raise BadInput(
                f"the state_dict of the loader takes {len(text)} bytes, and may take {plain_values.MAX_BYTES}: make it smaller."
            )
        return self._epoch, text

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = iter(self.loader)
        for batch in self._batches:
            return batch
        self._epoch += 1
        _set_epoch(self.loader, self._epoch)
        self._batches = iter(self.loader)
        for batch in self._batches:
            return batch
        raise BadInput(
            f"the loader ended in its epoch {self._epoch - 1} and has no batches when it is iterated over again: give fewer "
            "steps, or a loader that can be iterated over again."
        )


@dataclass(frozen=True, slots=True, eq=False)
class Streamed:
    """A loader that takes the next `parts` batches of the script's own data loader for every step.

    The random generators are seeded before loading, and again before training, because a restored loader may not draw
    as many random numbers as a loader that was not interrupted."""

    dataset: OwnSamples
    parts: int
    feed: LoaderBatches

    def __getitem__(self, request: LoadRequest) -> Loaded:
        rng.set_all(request.key)
        batches = [next(self.feed) for _ in range(self.parts)]
        rng.set_all(request.key)
        return request, batches

    def position(self) -> tuple[int, str]:
        return self.feed.position()


def _check_sampler(loader: Any) -> None:
    """Raise BadInput if the loader's sampler would not continue in the same order after a restart.

    PyTorch's random samplers do not save their position. If loader and sampler share a generator, a restored loader
    draws one number less from it, so the next epoch would differ."""
    if not isinstance(loader, DataLoader):
        return
    batches = loader.batch_sampler
    for sampler in (loader.sampler, getattr(batches, "sampler", None)):
        if isinstance(sampler, DRAWING) and not hasattr(sampler, "state_dict"):
            raise BadInput(
                f"PyTorch's {type(sampler).__name__} does not save its position, and would begin another order after a restart: "
                "use torchdata's RandomSampler (torchdata.stateful_dataloader.sampler), or shuffle=True."
            )
    if loader.generator is not None and loader.generator is getattr(loader.sampler, "generator", None):
        raise BadInput(
            "a generator that the loader shares with its sampler is not restored exactly: give it to the sampler alone, "
            "as in StatefulDataLoader(data, sampler=RandomSampler(data, generator=g)) with torchdata's RandomSampler."
        )


def _set_epoch(loader: Any, epoch: int) -> None:
    batches = getattr(loader, "batch_sampler", None)
    sampler, inner = getattr(loader, "sampler", None), getattr(batches, "sampler", None)
    for part in (loader, sampler, batches, inner, getattr(loader, "dataset", None)):
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)
