"""The process groups of a run that recovers live: a group for DDP, and the default group of torch.distributed.

DDP starts a sum for every bucket of gradients during backward and gets the link's own `Work` objects. So nothing is
copied, and backward does not wait, as long as no member is lost. After a loss, DDP's backward raises once all gradients
are computed. Then each bucket holds either its complete sum or garbage, and `param.grad` still holds the gradients of
this rank.

Collectives that a script calls itself use torch's own groups, which do not survive a lost member. A replacement worker
has missed the earlier exchanges, so such a run restarts after a loss. Once the members have changed, the default group
is a placeholder that knows only rank and size; a collective on it makes the run restart.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions, BroadcastOptions, HashStore, ProcessGroup, Store, distributed_c10d  # type: ignore[attr-defined]

from holdfast import progress
from holdfast.distributed.gloo_link import CompletedWork, Link, wait_until_ended
from holdfast.progress import restart_needed

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class BucketSum:
    """The sum of one gradient bucket over the ranks; `work` is its all-reduce. `is_done` is None until `work` ends."""

    values: torch.Tensor
    work: Any
    is_done: bool | None = None  # unknown before the work has ended

    def has_failed(self) -> bool:
        try:
            future = self.work.get_future()
            if future.done():
                future.value()
        except RuntimeError:
            return True
        return False


class RecoverableGroup(ProcessGroup):
    """The process group for DDP in runs where the other workers continue when a worker is lost.

    Its size never changes, and DDP divides gradients by this size. `factor` scales this rank's gradients, so that every
    sample of a step has the same weight. `all_posted` is called in every backward pass, once the all-reduce of the last
    bucket has started."""

    def __init__(self, link: Link, rank: int, size: int, all_posted: Callable[[], None]) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # there is such a form
        self._link, self._size, self._all_posted = link, size, all_posted
        self.factor = 1.0
        self.sums: list[BucketSum] = []
        self._spent: list[BucketSum] = []
        self.given: dict[int, torch.Tensor] = {}
        """Sums for the next backward that this rank received when it joined, by bucket number."""
        self._buckets: list[list[torch.Tensor]] = []
        self.watch: Callable[[Sequence[Any], int], None] | None = None  # see Replica.watch

    def getBackendName(self) -> str:
        return "holdfast"

    def lay_out(self, buckets: list[list[torch.Tensor]]) -> None:
        """Set the parameters that each of DDP's gradient buckets contains."""
        self._buckets = buckets

    def empty(self, number: int) -> torch.Tensor:
        """Return an uninitialised tensor for the values of gradient bucket `number`."""
        parameters = self._buckets[number]
        return parameters[0].new_empty(sum(parameter.numel() for parameter in parameters))

    def begin(self) -> None:
        """Prepare for a backward pass whose gradients are summed over the ranks."""
        self.sums = []

    def end(self) -> None:
        """Release the all-reduced gradient buckets of a completed backward pass.

        Freeing takes time, so buckets in host memory are freed during the next backward. Buckets on a device are freed
        at once, because gloo holds pinned memory for each of them."""
        self._spent, self.sums = [] if self.sums[0].values.is_cuda else self.sums, []

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]  # as DDP calls it
        (values,) = tensors
        if self.watch and not self.sums:
            self.watch([], len(self._buckets))
        if self.given and (given := self.given.pop(len(self.sums), None)) is not None:
            self.sums.append(BucketSum(values.copy_(given), CompletedWork([values]), is_done=True))
        else:
            if self.factor != 1.0:
                values.mul_(self.factor)
            self.sums.append(BucketSum(values, self._link.post("allreduce", tensors, opts or AllreduceOptions())))
        work = self.sums[-1].work
        if self.watch:
            self.watch([bucket.work for bucket in self.sums], len(self._buckets))
        if len(self.sums) == len(self._buckets):
            self._spent = []
            self._all_posted()
        return work

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        return self._link.post("broadcast", tensors, opts or BroadcastOptions())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._link.post("allgather", outputs, inputs)

    def has_failed(self) -> bool:
        """Return True if a gradient sum of the current backward pass has failed."""
        return any(bucket.has_failed() for bucket in self.sums)

    def drop(self, *, is_scaled: bool) -> None:
        """Make the optimizer skip this step: remove all gradients or, if `is_scaled`, set them to infinity.

        A gradient scaler needs gradients. If they are infinite, it assumes an overflow, skips the step and lowers its
        scale."""
        for parameter in (parameter for bucket in self._buckets for parameter in bucket):
            if is_scaled and parameter.grad is not None:
                parameter.grad.fill_(torch.inf)
            else:
                parameter.grad = None

    def drain(self) -> None:
        """Wait until all gradient sums under way have ended, and note which of them succeeded."""
        unknown = [bucket for bucket in self.sums if bucket.is_done is None]
        wait_until_ended([bucket.work for bucket in unknown])
        for bucket in unknown:
            bucket.is_done = not bucket.has_failed()
            bucket.work = CompletedWork([])  # the work is freed because it may hold pinned memory

    @torch.no_grad()
    def pack(self, number: int) -> None:
        """Refill bucket `number` with this rank's own gradients, scaled for an all-reduce.

        Call this after the all-reduce of the bucket has failed."""
        for parameter, view in self._views(number):
            if parameter.grad is None:
                view.zero_()
            else:
                torch.mul(parameter.grad, 1.0 / self._size, out=view)
        if self.factor != 1.0:
            self.sums[number].values.mul_(self.factor)

    def sum_again(self, numbers: Sequence[int]) -> None:
        """All-reduce the gradient buckets `numbers` again, over the workers that are left."""
        for number in numbers:
            self.pack(number)
            values = self.sums[number].values
            self.sums[number] = BucketSum(values, self._link.post("allreduce", [values]))
        for number in numbers:
            self._link.wait(self.sums[number].work)
            self.sums[number].is_done = True

    @torch.no_grad()
    def unpack(self) -> None:
        """Copy the bucket sums into the gradients of the parameters, as DDP would have done."""
        for number in range(len(self.sums)):
            for parameter, view in self._views(number):
                if parameter.grad is not None:
                    parameter.grad.copy_(view)

    def _views(self, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each parameter of bucket `number`, and the view of the bucket that holds its gradient."""
        place, values = 0, self.sums[number].values
        for parameter in self._buckets[number]:
            flat = values.narrow(0, place, parameter.numel())
            place += parameter.numel()
            if parameter.is_contiguous() or parameter.is_contiguous(memory_format=torch.channels_last):
                yield parameter, flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
            else:
                yield parameter, flat.view(parameter.shape)


SCRIPT_COLLECTIVES = (
    "the script calls torch.distributed itself, whose groups end with the first lost worker; run.sum and run.mean "
    "continue without it"
)
_BACKEND = "holdfast_outlived"
_COLLECTIVES = ("all", "barrier", "broadcast", "gather", "monitored", "recv", "reduce", "scatter", "send")


def has_script_collectives() -> bool:
    """Return True if the script itself uses torch.distributed. The first time, also warn and inform the supervisor."""
    groups: list[Any] = list(distributed_c10d._world.pg_map)
    own = [group for group in groups if not getattr(group, "outlives_workers", False)]
    # Every collective on a group increases its sequence number. The script has made all groups but the default one.
    default: Any = dist.group.WORLD
    has_used = any(group is not default or group._get_sequence_number_for_group() > 0 for group in own)
    if has_used and not progress.here.has_exchanged:
        progress.here.has_exchanged = True
        if dist.get_rank() == 0:
            logger.warning(
                "After the loss of a worker this run restarts, as with --recovery restart: %s.", SCRIPT_COLLECTIVES
            )
    return has_used


def replace_default_group(rank: int, size: int) -> None:
    """Replace torch's default process group by a placeholder that knows only `rank` and `size`."""
    if isinstance(dist.group.WORLD, ReplacedGroup) and dist.get_rank() == rank:
        return
    leave_default_group()
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            _BACKEND,
            lambda _, rank, size, __: ReplacedGroup(rank, size),  # type: ignore[call-arg]  # this form exists
            devices=["cpu", "cuda"],
        )
    dist.init_process_group(_BACKEND, store=HashStore(), rank=rank, world_size=size)
    if (group := dist.group.WORLD) is not None:
        distributed_c10d._world.pg_map[group] = (dist.Backend.GLOO, NoStore())  # for groups that a script makes from it


_kept: list[
    object
] = []  # freeing a group waits for a thread while holding the GIL, sometimes forever (torch 2.13, gloo)


def leave_default_group() -> None:
    """Destroy torch's default process group, if there is one."""
    if dist.is_initialized():
        _kept.append(dist.group.WORLD)
        dist.destroy_process_group()


class ReplacedGroup(ProcessGroup):
    """A placeholder for torch's default process group after workers were lost: any collective makes the run restart."""

    outlives_workers = True

    @property
    def group_name(self) -> Any:
        """Raise an error that makes the run restart: a functional collective asks for the name of this group."""
        _fall_back()


class NoStore(Store):
    """The store of a `ReplacedGroup` (placeholder process group): any use raises an error that restarts the run."""


def _fall_back(*_: Any, **__: Any) -> NoReturn:
    progress.here.has_exchanged = True
    raise restart_needed(SCRIPT_COLLECTIVES)


for _name in filter(lambda name: name.lstrip("_").startswith(_COLLECTIVES), dir(ProcessGroup)):
    setattr(ReplacedGroup, _name, _fall_back)
for _name in ("add", "check", "compare_set", "get", "set", "wait"):
    setattr(NoStore, _name, _fall_back)
