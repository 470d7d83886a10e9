"""Connections among members with one GPU each: NCCL sums tensors on the GPUs, gloo does everything else.

NCCL waits forever for a lost peer, and reports an aborted operation as complete. So a worker that learns of a loss
aborts the communicator, which ends every operation on the GPU. An operation counts as done only if it was seen to
complete before the abort. The `Work` that DDP gets completes once this is known. Unlike NCCL's own `Work`, it keeps
backward waiting until the GPU has summed the last bucket, so the next step is not queued behind it.

The loss of a peer is untested with two or more GPUs. The tests cover the code that does not need NCCL, and a single
rank on one GPU. If a member dies while the communicator is built, the communicator and its thread are abandoned.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # they are public
from torch.futures import Future

from holdfast.distributed.gloo_link import POLL_SECONDS, GroupBroken, Link

NCCL = "cpu:gloo,cuda:nccl"


def why_not(backend: str) -> str | None:
    """Return the reason why workers on this collective backend cannot recover without a restart; None if they can."""
    if backend == "gloo":
        return None
    if backend != NCCL:
        return f"the backend {backend} is not known to end operations whose peer is lost"
    if not dist.is_nccl_available() or not hasattr(dist.ProcessGroupNCCL, "abort"):
        return "this NCCL cannot abort operations whose peer is lost"
    return None


def link_for(backend: str, device: torch.device) -> Link:
    """Return a new `Link` to the other workers.

    For the `backend` "gloo" the link uses only gloo. Otherwise it sums tensors on `device` with NCCL, and uses gloo for
    all other operations."""
    return Link() if backend == "gloo" else DeviceLink(device)


class DeviceLink(Link):
    """A link to other workers that sums tensors on `device` with NCCL and does everything else with gloo."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self._sums = device, _Sums()

    def hang_up(self) -> None:
        self.is_broken = True
        self._sums.abort()
        super().hang_up()

    def connect(self, store: Callable[[], Store], rank: int, size: int, outdated: Callable[[], bool]) -> None:
        super().connect(store, rank, size, outdated)
        sums = _Sums()
        built = threading.Thread(
            target=sums.build, args=(PrefixStore("nccl", store()), rank, size, self._device), daemon=True
        )
        built.start()
        while built.is_alive():
            if outdated() or self.is_broken:
                raise GroupBroken("the membership has changed while its communicator was built")
            time.sleep(POLL_SECONDS)
        if sums.error:
            raise GroupBroken(str(sums.error)) from sums.error
        self._sums, self._group = sums, _Both(self._group, sums)


class _Both:
    """A process group that sums GPU tensors with NCCL and does everything else with gloo."""

    def __init__(self, host: Any, sums: "_Sums") -> None:
        self._host, self._sums = host, sums
        self.broadcast, self.allgather = host.broadcast, host.allgather  # some ranks may have these tensors on the host
        self.send, self.recv = host.send, host.recv

    def allreduce(self, tensors: list[torch.Tensor], *options: Any) -> Any:
        return (self._sums if tensors[0].is_cuda else self._host).allreduce(tensors, *options)


class _Sums:
    """An NCCL communicator for sums, with a thread that waits for each operation to complete on the device."""

    def __init__(self) -> None:
        self.is_aborted, self.error, self._group = False, None, None  # type: tuple[bool, Exception | None, Any]
        self._posted: queue.SimpleQueue[NcclWork] = queue.SimpleQueue()

    def build(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        """Build the NCCL communicator of `size` ranks; keep an exception in `error`. Runs in a thread of its own."""
        # Otherwise a thread of NCCL ends this process when it finds that a peer is lost.
        os.environ |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
        try:
            torch.cuda.set_device(device)
            group: Any = dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
            group.allreduce([torch.zeros(1, device=device)]).wait()
            torch.cuda.current_stream(device).synchronize()
        except (RuntimeError, ValueError) as error:
            self.error = error
            return
        self._group = group
        threading.Thread(target=self._watch, name="holdfast-sums", daemon=True).start()

    def allreduce(self, tensors: list[torch.Tensor], *options: Any) -> "NcclWork":
        posted = NcclWork(self._group.allreduce(tensors, *options), tensors, self)
        self._posted.put(posted)
        return posted

    def abort(self) -> None:
        """Abort all operations under way. Operations that are not known to be complete count as failed."""
        was_aborted, self.is_aborted = self.is_aborted, True
        if self._group is not None and not was_aborted:
            with suppress(RuntimeError):
                self._group.abort()

    def _watch(self) -> None:
        while True:
            posted = self._posted.get()
            while not posted.has_ended():
                time.sleep(POLL_SECONDS)
            posted.conclude()


class NcclWork(dist.Work):
    """The `Work` of an NCCL operation: it completes once the operation has ended on the device."""

    def __init__(self, work: Any, tensors: list[torch.Tensor], sums: _Sums) -> None:
        super().__init__()
        self._work, self._tensors, self._sums = work, tensors, sums
        self._has_ended: Future[None] = Future()
        self._future = self._has_ended.then(self._outcome)  # DDP's C++ code sees what this raises

    def has_ended(self) -> bool:
        """Return True if the operation has ended on the device, successfully or not."""
        try:
            return bool(self._work.is_completed())
        except RuntimeError:
            return True

    def conclude(self) -> None:
        """Complete the future that DDP waits for."""
        self._has_ended.set_result(None)

    def _outcome(self, _: Future[None]) -> list[torch.Tensor]:
        if self._sums.is_aborted or not self._work.is_success():
            raise GroupBroken("the membership has changed")
        return self._tensors

    def get_future(self) -> Future[Any]:
        return self._future

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return self._has_ended.done()
