"""Load the samples of each step with torch's DataLoader, in this process or ahead of time in loader processes.

The random generators are seeded before each share (one rank's samples of a step) is loaded, and training continues with
the generator states that loading left behind. So loader processes change the speed and nothing else.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from multiprocessing import popen_fork
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from holdfast import process as preemption
from holdfast.blocks.division import Ids
from holdfast.errors import BadInput
from holdfast.sampler.digest import Samples
from holdfast.sampler.plan import Position, SamplePlan
from holdfast.train.state import rng

Collate = Callable[[list[Any]], Any]


class MapDataset(Protocol):
    """A map-style dataset: it has a length, and a sample for each index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


PROBES = 4  # samples whose digest identifies a dataset
PROBE = "probe"
SHOWN = 8  # sample ids that an error names
CHUNK = 1 << 14  # sample ids computed together: the calls take most of the time of a few
TOGETHER = 16  # requests made together: each takes a quarter of its time alone (benchmarks/steady)


@dataclass(slots=True, eq=False)
class LoadRequest:
    """A request to load the samples `ids` of one rank in one step. `key` seeds the random generators for them.

    `numbers` are the same ids as Python integers, `samples` their count and digest.
    """

    ids: Ids
    numbers: list[int]
    samples: Samples
    key: int


Loaded = tuple[LoadRequest, list[Any]]  # what was requested, collated in parts


class ShareLoader(Protocol):
    """An object that loads the samples of one rank and step, and collates them into `parts` micro-batches."""

    @property
    def dataset(self) -> MapDataset: ...
    @property
    def parts(self) -> int: ...
    def __getitem__(self, request: LoadRequest, /) -> Loaded: ...
    def position(self) -> tuple[int, str] | None:
        """Return the position of the data source, for a snapshot; None if the step number determines the position."""


@dataclass(frozen=True, slots=True, eq=False)
class ShareDataset:
    """A loader of shares (one rank's samples of a step). To torch it looks like a dataset whose items are shares."""

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
        """Return None: the loader needs no position to resume, because the step number determines the samples."""

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


def size(dataset: MapDataset) -> int:
    """Return the number of samples in a dataset; raise BadInput if it has no length or cannot be indexed."""
    try:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError("its samples have no numbers")
        return len(dataset)
    except TypeError as error:
        raise BadInput(
            f"a {type(dataset).__name__} is not a map-style dataset ({error}): give one with __len__ and __getitem__, or "
            "write run.stream(loader, steps=N) if it is a loader with state_dict and load_state_dict."
        ) from error


def probe(dataset: MapDataset, count: int, seed: int) -> str:
    """Return a digest of a few of the dataset's `count` samples, to recognise the dataset.

    A dataset that was split or shuffled without a seed differs in every process, though its length and sample ids are
    the same. Comparing digests reveals this before the training begins. The random generators are seeded from `seed`
    before each sample.
    """
    hasher = xxhash.xxh3_64()
    for index in sorted({i * (count - 1) // (PROBES - 1) for i in range(PROBES)}):
        rng.set_all(rng.key(seed, PROBE, index))
        _add(hasher, dataset[index])
    return str(hasher.hexdigest())


def _add(hasher: Any, value: Any) -> None:
    """Hash the type of `value` and, for numbers, texts, arrays, tensors and nested containers, also the contents."""
    hasher.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(value, Mapping):
        for key, item in value.items():
            hasher.update(str(key).encode())
            _add(hasher, item)
    elif isinstance(value, list | tuple):
        for item in value:
            _add(hasher, item)
    elif isinstance(value, np.ndarray | np.generic):
        hasher.update(repr((value.dtype.str, value.shape)).encode())
        hasher.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, bytes | str):
        hasher.update(value if isinstance(value, bytes) else value.encode())
    elif isinstance(value, int | float | complex | None):
        hasher.update(repr(value).encode())
    elif hasattr(value, "tobytes"):  # an image
        hasher.update(value.tobytes())


def requests(geometry: SamplePlan, start: int, rank: int, world: int) -> Iterator[LoadRequest]:
    """Yield the requests for the samples of `rank` among `world` ranks, one per step from step `start` on."""
    places = geometry.places(rank, world)
    together = max(1, CHUNK // len(places))
    for chunk in range(start, geometry.steps, together):
        steps = range(chunk, min(chunk + together, geometry.steps))
        shares = geometry.windows(steps, places)
        ahead = zip(steps, shares, Samples.of_each(shares), strict=True)
        while requested := [
            LoadRequest(ids, ids.tolist(), samples, share_key(geometry, geometry.position(step), rank))
            for step, ids, samples in islice(ahead, TOGETHER)
        ]:
            yield from requested


class SampleSource:
    """An iterator over this rank's loaded samples, step by step. `divide` changes the rank and the world size."""

    def __init__(self, shares: ShareLoader, geometry: SamplePlan, options: Mapping[str, Any]) -> None:
        self._shares, self._geometry, self._options = shares, geometry, options
        self._wanted = LoadRequests(iter(()))
        self._loaded: Iterator[Loaded] = iter(())

    def divide(self, start: int, rank: int, world: int) -> None:
        """Continue with step `start`, and from there load only the samples of rank `rank` among `world` ranks."""
        self._wanted = LoadRequests(requests(self._geometry, start, rank, world))
        self._loaded = load(self._shares, self._wanted, **self._options)

    def prepare(self) -> None:
        """Compute the next load request (sample ids and seed) without loading the samples."""
        self._wanted.prepare()

    def __next__(self) -> Loaded:
        return next(self._loaded)


class LoadRequests:
    """An iterator of requests to load samples; the next request can be prepared early, while gradients are summed."""

    def __init__(self, wanted: Iterator[LoadRequest]) -> None:
        self._wanted = wanted
        self._next: LoadRequest | None = None

    def __iter__(self) -> Iterator[LoadRequest]:
        return self

    def __next__(self) -> LoadRequest:
        request, self._next = self._next, None
        return request or next(self._wanted)

    def prepare(self) -> None:
        """Compute the next request now. This loads no samples and draws no random numbers."""
        if self._next is None:
            self._next = next(self._wanted, None)


def share_key(geometry: SamplePlan, at: Position, share: int) -> int:
    """Return the seed of the random generators for the samples of rank `share`, in the step at position `at`."""
    return rng.key(geometry.seed, rng.WINDOW, at.epoch, at.cursor, share)


@dataclass(frozen=True, slots=True, eq=False)
class SubprocessLoads:
    """A loader to run in a loader process: it returns the samples with the random generator states after loading."""

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
    """Iterate over the samples that `shares` loads for each request in `wanted`; `num_workers` processes load ahead."""
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
    """Return the loaded samples, and set this process's random generators to their states after loading."""
    share, states = loaded
    rng.set_all(share[0].key)
    if states is not None:
        states.restore()
    return share


def _context(given: Any) -> Any:
    """Return the multiprocessing context for loader processes: `Loaders` if they are forked, otherwise `given`."""
    chosen = given or multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    name = chosen if isinstance(chosen, str) else chosen.get_start_method()
    return Loaders() if name == "fork" else given


class _Serve:
    """A worker_init_fn that makes a loader process ignore stop signals and die with the training process.

    Then it calls `then`, the script's own worker_init_fn, which finds the script's own dataset in get_worker_info().
    """

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
    """A process handle whose `terminate` sends SIGKILL, because loader processes ignore SIGTERM."""

    def terminate(self) -> None:
        self.kill()


class _Loader(ForkProcess):
    @staticmethod
    def _Popen(process: Any) -> popen_fork.Popen:
        return _Killed(process)


class Loaders(ForkContext):
    """A fork context whose processes are ended by SIGKILL instead of SIGTERM."""

    Process = _Loader


def divided(count: int, parts: int) -> list[range]:
    """Divide 0..count-1 into `parts` contiguous ranges whose sizes differ by at most one."""
    ends = [part * count // parts for part in range(parts + 1)]
    return [range(first, end) for first, end in pairwise(ends)]


def _as_it_is(value: Any) -> Any:
    return value


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
    "shuffle": f"{_OURS}, in an order that comes from the seed: leave it out",
    "sampler": f"{_OURS}: leave it out",
    "batch_sampler": f"{_OURS}: leave it out",
    "drop_last": "samples that do not fill a step always wait for the next epoch: leave it out",
    "in_order": "steps that overtake each other could not be resumed: leave it out",
    "generator": "the run keys every generator: give a seed",
    "collate_fn": "give run.batches(..., collate_fn=...)",
    "dataset": "give it as the first argument",
}


def checked_options(num_workers: int, dataloader_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options for the run's DataLoader, with `num_workers`; raise BadInput if an option is not allowed."""
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
