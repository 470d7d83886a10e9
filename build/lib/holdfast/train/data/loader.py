"""Load the samples of each step with torch's DataLoader, in this process or ahead of time in loader processes.

The random generators are seeded before each share (one rank's samples of a step) is loaded, and training continues with
the generator states that loading left behind. So loader processes change the speed and nothing else.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import popen_fork
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, get_worker_info

from holdfast import process as preemption
from holdfast.blocks.division import Ids
from holdfast.errors import BadInput
from holdfast.sampler.digest import Samples
from holdfast.train.data.dataset import MapDataset
from holdfast.train.state import rng

Collate = Callable[[list[Any]], Any]
SHOWN = 8  # sample ids that an error names
TAKEN = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory",
    "pin_memory_device",
    "worker_init_fn",
    "multiprocessing_context",
    "timeout",
)
_OURS = "the run decides the order of samples"
REFUSED = {
    "batch_size": f"{_OURS}: give global_batch",
    "shuffle": f"{_OURS}, in an order that comes from the seed: leave it out, or give run.batches(..., sampler=...)",
    "sampler": "give run.batches(..., sampler=...)",
    "batch_sampler": f"{_OURS}: leave it out, or give run.batches(..., sampler=...)",
    "drop_last": "samples that do not fill a step always wait for the next epoch: leave it out",
    "in_order": "steps that overtake each other could not be resumed: leave it out",
    "generator": "the run keys every generator: give a seed",
    "collate_fn": "give run.batches(..., collate_fn=...)",
    "dataset": "give it as the first argument",
}


@dataclass(slots=True, eq=False)
class LoadRequest:
    """A request to load the samples `ids`, which one rank trains in one step. `key` seeds the random generators.

    `numbers` are the same ids as Python integers. `samples` holds the number of samples, and a digest of the ids."""

    ids: Ids
    numbers: list[int]
    samples: Samples
    key: int


Loaded = tuple[LoadRequest, list[Any]]  # what was requested, collated in parts


class ShareLoader(Protocol):
    """A loader of the samples that one rank trains in one step, collated into `parts` micro-batches."""

    @property
    def dataset(self) -> MapDataset: ...
    @property
    def parts(self) -> int: ...
    def __getitem__(self, request: LoadRequest, /) -> Loaded: ...
    def position(self) -> tuple[int, str] | None:
        """Return the position to save: (epoch, the data source's state as text). None if the step number is enough."""


@dataclass(frozen=True, slots=True, eq=False)
class ShareDataset:
    """A dataset for torch's DataLoader. Each item consists of all samples that one rank trains in one step."""

    dataset: MapDataset
    parts: int
    collate: Collate

    def __getitem__(self, request: LoadRequest) -> Loaded:
        rng.set_all(request.key)
        samples = list(self._samples(request.numbers))
        if self.parts == 1:
            return request, [self.collate(samples)]
        return request, [self.collate(samples[part.start : part.stop]) for part in divided(len(samples), self.parts)]

    def position(self) -> None:
        """Return None: the step number is enough to resume, because it determines the samples."""

    def _samples(self, ids: list[int]) -> Sequence[Any]:
        get_all: Callable[[list[int]], Sequence[Any]] | None = getattr(self.dataset, "__getitems__", None)
        samples: list[Any] = []
        try:
            if get_all:
                return get_all(ids)
            samples.extend(self.dataset[index] for index in ids)
        except Exception as error:
            which = _one_of(ids) if get_all else f"sample {ids[len(samples)]}"
            error.add_note(f"{which} raised this")
            raise
        return samples


def _one_of(ids: list[int]) -> str:
    return f"one of samples {', '.join(map(str, ids[:SHOWN]))}{' and more' if len(ids) > SHOWN else ''}"


@dataclass(frozen=True, slots=True, eq=False)
class SubprocessLoads:
    """A wrapper of the loader `shares` for use in a worker process of torch's DataLoader.

    It also returns the states of the random generators after loading, if loading drew random numbers."""

    shares: ShareLoader

    def __getitem__(self, request: LoadRequest) -> tuple[Loaded, rng.States | None]:
        loaded = self.shares[request]
        states = rng.States.now()
        rng.set_all(request.key)
        return loaded, None if states == rng.States.now() else states


def load(
    shares: ShareLoader,
    wanted: Iterable[LoadRequest],
    num_workers: int,
    *,
    worker_init_fn: Callable[[int], object] | None = None,
    multiprocessing_context: Any = None,
    **options: Any,
) -> Iterator[Loaded]:
    """Yield the samples that `shares` loads for each request in `wanted`. `num_workers` processes load ahead of time."""
    if not (num_workers or options):
        return map(shares.__getitem__, wanted)  # what a DataLoader would do, without its overhead
    if num_workers:
        options["worker_init_fn"] = _Serve(os.getpid(), shares.dataset, worker_init_fn)
        options["multiprocessing_context"] = _context(multiprocessing_context)
    options.setdefault("pin_memory", torch.cuda.is_initialized())
    try:
        loader: DataLoader[Any] = DataLoader(
            SubprocessLoads(shares) if num_workers else shares,  # type: ignore[arg-type]  # torch only calls __getitem__
            batch_size=None,
            sampler=wanted,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            generator=torch.Generator(),  # otherwise the loader draws from the generator of training
            **options,
        )
    except (ValueError, TypeError) as error:
        raise BadInput(f"torch's DataLoader refuses the options of the run: {error}.") from error
    with preemption.held_back():  # signals, until the loader processes can ignore them
        return map(_with_generators, iter(loader)) if num_workers else iter(loader)


def _with_generators(loaded: tuple[Loaded, rng.States | None]) -> Loaded:
    """Return the loaded samples, and set the random generators of this process to their states after loading."""
    share, states = loaded
    rng.set_all(share[0].key)
    if states is not None:
        states.restore()
    return share


def _context(given: Any) -> Any:
    chosen = given or multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    name = chosen if isinstance(chosen, str) else chosen.get_start_method()
    return Loaders() if name == "fork" else given


class _Serve:
    """A worker_init_fn that makes a loader process ignore stop signals and die with the training process.

    Afterwards it calls `then`, the worker_init_fn of the script."""

    def __init__(self, worker: int, dataset: MapDataset, then: Callable[[int], object] | None) -> None:
        self._worker, self._dataset, self._then = worker, dataset, then
        # The kernel watches the thread that forks: if that is not the main thread, its end must not end the loading.
        self._stays = threading.current_thread() is threading.main_thread()

    def __call__(self, number: int) -> None:
        preemption.outlast()
        if self._stays:
            preemption.die_with_parent()
            if os.getppid() != self._worker:
                os._exit(1)  # the worker died before the request
        if about := get_worker_info():
            object.__setattr__(about, "dataset", self._dataset)
        if self._then:
            self._then(number)


class _Killed(popen_fork.Popen):
    """A process handle that ends the process with SIGKILL, because loader processes ignore SIGTERM."""

    def terminate(self) -> None:
        self.kill()


class _Loader(ForkProcess):
    @staticmethod
    def _Popen(process: Any) -> popen_fork.Popen:
        return _Killed(process)


class Loaders(ForkContext):
    """A multiprocessing context that forks processes, and ends them with SIGKILL instead of SIGTERM."""

    Process = _Loader


def checked_options(num_workers: int, dataloader_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `dataloader_options` with `num_workers` added; raise BadInput for options that a run does not support."""
    options = dict(dataloader_options or {})
    for name in options:
        if name in REFUSED:
            raise BadInput(f"dataloader_options={{{name!r}: ...}} is not possible: {REFUSED[name]}.")
        if name not in TAKEN:
            raise BadInput(f"dataloader_options has no option {name!r}: give one of {', '.join(TAKEN)}.")
    chosen = options.pop("num_workers", num_workers)
    if num_workers and chosen != num_workers:
        raise BadInput(
            f"num_workers={num_workers} and dataloader_options={{'num_workers': {chosen}}} differ: give one of them."
        )
    if not isinstance(chosen, int) or chosen < 0:
        raise BadInput(f"num_workers must be 0 (load in the training process) or more (got {chosen}).")
    return {"num_workers": chosen, **options}


def divided(count: int, parts: int) -> list[range]:
    """Divide 0..count-1 into `parts` contiguous ranges whose sizes differ by at most one."""
    ends = [part * count // parts for part in range(parts + 1)]
    return [range(first, end) for first, end in pairwise(ends)]


def _as_it_is(value: Any) -> Any:
    return value
