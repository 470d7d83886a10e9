"""The ways to save that are compared, each as a function that starts one save of the same tensors."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from holdfast.checkpoint.capture import HostImage
from holdfast.checkpoint.device import pin
from holdfast.checkpoint.store import DirectoryStore
from holdfast.checkpoint.writer import Saved, Writer, alone, blocking, overlapped

Tensors = dict[str, torch.Tensor]


@dataclass
class Started:
    """A save in progress, with functions that say when training may change the state, and when all is on the disk."""

    staged: Callable[[], object] = lambda: None
    """Wait until training may change the state again."""
    durable: Callable[[], float | None] = lambda: time.perf_counter()
    """Return the time at which all was on the disk, or None before that."""


Arm = Callable[[Path], Started]


def bounds(tensors: Tensors) -> dict[str, Arm]:
    """Return the lower bounds of any save: one copy of the memory, one write of the bytes."""
    cuda = next(iter(tensors.values())).is_cuda
    kept = {name: torch.zeros_like(value) for name, value in tensors.items()}
    size = sum(value.nbytes for value in tensors.values())

    def copy(place: Path) -> Started:
        for name, value in tensors.items():
            kept[name].copy_(value)
        return Started()

    image = HostImage(size)
    flat = torch.from_numpy(image.bytes)
    if cuda:
        pin(image)
    spans = list(_spans(tensors))

    def to_host(place: Path) -> Started:
        for name, start, end in spans:
            flat[start:end].copy_(tensors[name].reshape(-1).view(torch.uint8), non_blocking=True)
        return Started()

    to_host(Path())

    def raw_write(place: Path) -> Started:
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        rest = image.bytes.data
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
        os.close(descriptor)
        return Started()

    def direct(place: Path) -> Started:
        DirectoryStore(place.parent).put(
            place.name, [image.bytes.data[i : i + (16 << 20)] for i in range(0, size, 16 << 20)]
        )
        return Started()

    first = (
        {"bound: copy on the device": copy, "bound: copy to pinned memory": to_host}
        if cuda
        else {"bound: memory copy": copy}
    )
    return {**first, "bound: raw write + fsync": raw_write, "bound: raw write past the page cache": direct}


def _spans(tensors: Tensors) -> Iterator[tuple[str, int, int]]:
    end = 0
    for name, value in tensors.items():
        start, end = end, end + value.nbytes
        yield name, start, end


@dataclass
class Ours:
    """A writer of holdfast, used for all repeats as in a run; its store keeps the last two snapshots."""

    make: Callable[..., Writer]
    tensors: Tensors
    folder: Path
    step: int = 0
    saved: list[Saved] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.writer = self.make(DirectoryStore(self.folder), keep_last=2)

    def __call__(self, place: Path) -> Started:
        self.step += 1
        began = time.perf_counter()
        self.writer.save(self.step, self.tensors, alone(self.step, self.tensors, {"step": self.step}))
        return Started(durable=lambda: self._durable(began))

    def _durable(self, began: float) -> float | None:
        self.saved += self.writer.finished()
        return began + self.saved[-1].seconds if self.saved and self.saved[-1].step == self.step else None


def peers(tensors: Tensors) -> dict[str, Arm]:
    """Return the methods that PyTorch users have. DCP's writer syncs its files; torch.save and torchsnapshot do not."""
    state: dict[str, Any] = {"state": tensors}

    def torch_save(place: Path) -> Started:
        with place.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        return Started()

    def dcp_save(place: Path) -> Started:
        dcp.save(state, checkpoint_id=place)
        return Started()

    found: dict[str, Arm] = {"torch.save + fsync": torch_save, "dcp.save": dcp_save}
    cuda = next(iter(tensors.values())).is_cuda
    for name, options in (CUDA_ASYNC if cuda else CPU_ASYNC).items():
        found[f"dcp.async_save, {name}"] = dcp_async(state, **options)
    with suppress(ImportError):
        found |= snapshots(tensors)
    return found


# A stager is given as the four options use_pinned_memory, use_shared_memory, use_async_staging, use_non_blocking_copy.
CPU_ASYNC: dict[str, dict[str, Any]] = {
    "default": {},
    "staged in the background": {"stager": (False, False, True, False)},
    "so staged, plan cached, two threads": {"stager": (False, False, True, False), "tuned": True},
    "in a process": {"kind": AsyncCheckpointerType.PROCESS},
}
CUDA_ASYNC: dict[str, dict[str, Any]] = {
    "default": {},
    "pinned": {"stager": (True, True, False, True)},
    "pinned, staged in the background": {"stager": (True, True, True, True)},
}


def dcp_async(
    state: dict[str, Any],
    *,
    stager: tuple[bool, bool, bool, bool] | None = None,
    tuned: bool = False,
    kind: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
) -> Arm:
    """DCP's save in the background; the stager is used for all repeats, as its documentation says."""
    made: list[DefaultStager] = []
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True) if tuned else None

    def start(place: Path) -> Started:
        options: dict[str, Any] = {"async_checkpointer_type": kind, "planner": planner}
        if stager is not None:
            if not made:
                made.append(DefaultStager(StagingOptions(*stager)))
            options["async_stager"] = made[0]
        if tuned:
            options["storage_writer"] = dcp.FileSystemWriter(place, single_file_per_rank=False, thread_count=2)
        answer = dcp.async_save(state, checkpoint_id=place, **options)
        staging, upload = getattr(answer, "staging_completion", None), getattr(answer, "upload_completion", answer)
        return Started(staging.result if staging is not None else lambda: None, stamped(upload))

    return start


def stamped(future: "Future[Any]") -> Callable[[], float | None]:
    """The time at which a future was done."""
    moment: list[float] = []
    future.add_done_callback(lambda _: moment.append(time.perf_counter()))

    def durable() -> float | None:
        if moment:
            future.result()  # raises what it failed of
        return moment[0] if moment else None

    return durable


def snapshots(tensors: Tensors) -> dict[str, Arm]:
    """Return the methods of torchsnapshot, if it is installed."""
    import torchsnapshot

    app = {"state": torchsnapshot.StateDict(**tensors)}

    def take(place: Path) -> Started:
        torchsnapshot.Snapshot.take(str(place), app)
        sync(place)
        return Started()

    def async_take(place: Path) -> Started:
        pending = torchsnapshot.Snapshot.async_take(str(place), app)
        moment: list[float] = []

        def wait() -> None:
            pending.wait()
            sync(place)
            moment.append(time.perf_counter())

        threading.Thread(target=wait).start()
        return Started(durable=lambda: moment[0] if moment else None)

    return {"torchsnapshot take + fsync": take, "torchsnapshot async_take + fsync": async_take}


def sync(place: Path) -> None:
    """Sync every file of a folder to the disk."""
    for path in place.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def ours(tensors: Tensors, folder: Path) -> dict[str, Arm]:
    """Return the two writers of holdfast."""
    return {
        "overlapped": Ours(overlapped, tensors, folder / "overlapped"),
        "blocking": Ours(blocking, tensors, folder / "blocking"),
    }


def remove(place: Path) -> None:
    """Remove the files that an arm wrote."""
    shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
