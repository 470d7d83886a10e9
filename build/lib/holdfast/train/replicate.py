"""A model on every rank: the same initial weights, and gradients summed over the ranks, weighted by their samples.

The sum does not depend on when a process was started. DDP reduces gradients in buckets and reorders the buckets after
the first backward of every process. The ring all-reduce adds the ranks in an order that depends on the position in a
bucket. So a resumed process would round differently until it has reordered its buckets (observed with three or more
ranks and about a megabyte or more). `_FixedBucketsDDP` fixes the order of the buckets before the first backward, so
that the order depends only on the model.

The private names of torch that this file uses are listed in tests/train/test_private_names.py.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # it is public
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from holdfast import progress
from holdfast.errors import BadInput
from holdfast.live.recovery import LiveRecovery


class Replica:
    """A model wrapped in DDP, with the weight of this rank's gradients and counts of its backward passes.

    `meanwhile` is called in every backward after the last gradient all-reduce has started."""

    def __init__(
        self,
        model: nn.Module,
        options: dict[str, Any],
        live: LiveRecovery | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self.reduced = 0  # backward passes whose gradients were summed over the ranks
        self.held = 0  # backward passes whose gradients stayed on this rank until a later one was summed
        self.holds_back = False  # gradients of this rank alone wait for a backward whose gradients are summed
        self._meanwhile = meanwhile
        self._is_next_summed: bool | None = None  # of the next backward; None if no forward has announced one
        self._group = live.new_group(self._after_last_gradient) if live else None
        if self._group:
            _check_live(model, options)
            options = {**options, "process_group": self._group}
        self.ddp = _FixedBucketsDDP(model, self._before_forward, live, **options)
        if self._group:
            self._group.lay_out(self.ddp.buckets())
        self.weight = 1.0 / self.ddp.process_group.size()  # the factor for this rank's gradients; at first DDP's own
        self._post: Callable[[torch.Tensor, int], Any] = self._all_reduce
        self._is_hooked = False
        if not self._group:  # a recoverable group calls `_after_last_gradient` itself, which is faster than a hook
            self._hook_last_gradient()

    def set_weight(self, weight: float) -> None:
        """Multiply this rank's gradients by `weight` before they are summed. Call this before the first backward."""
        if self._group is None and weight != self.weight:  # equal weights are left to DDP, where they cost nothing
            self.weight = weight
            self.ddp.sum_with(self._sum)

    def watch(self, posted: Callable[[Sequence[Any], int], None]) -> None:
        """Call `posted(works, buckets)` in every backward: before the first all-reduce, and after the start of each.

        `works` are the all-reduces of this backward that have started; `buckets` is their final number."""
        if self._group:
            self._group.watch = posted
            return
        if self.ddp.mixed_precision:
            raise BadInput(
                "A failure cannot be injected in the backward of a model with DDP's option mixed_precision. "
                "Choose another point, such as forward."
            )
        works: list[Any] = []
        buckets = len(self.ddp.buckets())

        def post(values: torch.Tensor, number: int) -> Any:
            if number == 0:
                works.clear()
                posted(works, buckets)
            works.append(self._all_reduce(values, number))
            posted(works, buckets)
            return works[-1]

        self._post = post
        self.ddp.sum_with(self._sum)

    def _sum(self, _: None, bucket: GradBucket) -> Future[torch.Tensor]:
        # Two products, as with live recovery, where DDP itself computes the first: every --recovery has the same bits.
        size = self.ddp.process_group.size()
        gradients = bucket.buffer().mul_(1.0 / size).mul_(self.weight * size)
        future = self._post(gradients, bucket.index()).get_future()
        summed: Future[torch.Tensor] = future.then(lambda done: done.value()[0])
        return summed

    def _all_reduce(self, values: torch.Tensor, _: int) -> Any:
        return dist.all_reduce(values, group=self.ddp.process_group, async_op=True)

    def _hook_last_gradient(self) -> None:
        for parameter in self.ddp.last_to_come():
            with torch.enable_grad():
                view = parameter.expand_as(parameter)
            assert view.grad_fn is not None
            accumulator = view.grad_fn.next_functions[0][0]
            assert accumulator is not None
            accumulator.register_hook(self._after_last_gradient)  # runs after DDP's hook, which posts the sum
        self._is_hooked = True

    def _before_forward(self, is_summed: bool) -> None:
        """Prepare for the next backward. `is_summed` is True if its gradients will be summed over the ranks."""
        self._is_next_summed = is_summed
        if not (is_summed or self._is_hooked):
            self._hook_last_gradient()
        if self._group and is_summed:
            self._group.begin()

    def _after_last_gradient(self, *_: Any) -> None:
        """Count the backward pass at its last gradient. Only the first call in each backward has an effect."""
        is_summed, self._is_next_summed = self._is_next_summed, None
        if is_summed:
            self.reduced += 1
            self.holds_back = False
            progress.here.count_post()  # this rank's gradients are computed: from here on it can only wait for peers
            self._meanwhile()
        elif is_summed is not None:
            self.held += 1
            self.holds_back = True


class _FixedBucketsDDP(DistributedDataParallel):
    """DDP whose buckets are final before the first backward, with a fast path for the usual forward.

    Plain DDP starts with one bucket and rebuilds its buckets after the first backward, in the order of the gradients.
    This class builds them at once, from the last parameter to the first.

    The fast path leaves out checks of DDP's forward whose result cannot change. It is used where DDP has no inputs to
    move or cast, no buffers to broadcast and no graph to search, and saves 4 to 5 % of a step of 2 ms
    (benchmarks/steady)."""

    def __init__(
        self,
        module: nn.Module,
        before_forward: Callable[[bool], None],
        live: LiveRecovery | None,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        **options: Any,
    ) -> None:
        self._before_forward, self._live = before_forward, live
        self._all_used = not (find_unused_parameters or static_graph)
        self._rebuilds = static_graph or not find_unused_parameters
        self._is_final = self._has_own_hook = False
        super().__init__(module, find_unused_parameters=find_unused_parameters, static_graph=static_graph, **options)
        if self._rebuilds:
            self.reducer._push_all_rebuilt_params()
            self._has_rebuilt_buckets = self.reducer._rebuild_buckets()
        self._is_final = True
        broadcasts = self.broadcast_buffers and self.modules_buffers
        special = self.device_ids or self.mixed_precision or self._delay_all_reduce_all_params or broadcasts
        self._is_usual = self._all_used and not special

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        # Not a forward hook: a module with hooks takes the slow way through nn.Module.
        is_summed, is_training = self.require_backward_grad_sync, torch.is_grad_enabled()
        if is_training:
            self._before_forward(is_summed)
        else:
            progress.here.count_evaluation()
        # DDP's own first forward sets up optimizers that step inside backward.
        is_fast = is_summed and is_training and self._is_usual and self._lazy_init_ran
        if not is_fast or self._join_config.enable or torch.compiler.is_compiling():
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        self.reducer.prepare_for_forward()
        _in_forward.append(self)
        try:
            output = self._modules["module"](*inputs, **kwargs)  # type: ignore[misc]  # faster than `self.module`
        finally:
            _in_forward.pop()
        if not self.require_forward_param_sync:  # setting an attribute of a module is slow
            self.require_forward_param_sync = True
        self.reducer.prepare_for_backward([])
        return output

    def buckets(self) -> list[list[torch.Tensor]]:
        """Return the parameters of each gradient bucket."""
        return [bucket.parameters() for bucket in self.reducer._get_zeros_like_grad_buckets()]

    def last_to_come(self) -> list[nn.Parameter]:
        """Return the parameters that may get the last gradient of a backward: one, or all if some may be unused."""
        parameters, _ = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return list(parameters[:1] if self._all_used else parameters)

    def sum_with(self, hook: Any) -> None:
        """Sum the gradient buckets with the communication hook `hook` from now on."""
        if not self._has_own_hook:
            super().register_comm_hook(None, hook)
        self._has_own_hook = True

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Raise BadInput, because a user's hook would not weight the gradients by the samples of each rank."""
        if self._is_final:
            raise BadInput("A replicated model sums its gradients itself: leave out register_comm_hook.")
        super().register_comm_hook(state, hook)  # DDP's own, for its option mixed_precision

    def _sync_buffers(self) -> None:
        progress.here.count_post()  # every rank waits for rank 0
        if self._live is None:
            super()._sync_buffers()  # type: ignore[no-untyped-call]
        else:
            self._live.sync_buffers(super()._sync_buffers, self.modules_buffers)

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return (parameters[::-1], sparse[::-1]) if self._rebuilds else (parameters, sparse)


# torch.compile asks DDP's class which replicated model is in its forward. DDP keeps the answer in an attribute of the
# class, and setting one makes Python drop its caches for that class, twice in every forward. A list has no such cost.
_in_forward: list[DistributedDataParallel] = []
_active_in_ddp = DistributedDataParallel._get_active_ddp_module


def _active_module(_: type[DistributedDataParallel]) -> DistributedDataParallel | None:
    return _in_forward[-1] if _in_forward else _active_in_ddp()  # type: ignore[no-untyped-call]


DistributedDataParallel._get_active_ddp_module = classmethod(_active_module)  # type: ignore[method-assign, assignment]


def holding_back(replicas: Iterable[Replica]) -> ExitStack:
    """Return a context manager in which backward passes of `replicas` do not sum the gradients over the ranks."""
    with ExitStack() as stack:
        for replica in replicas:
            stack.enter_context(replica.ddp.no_sync())
        return stack.pop_all()


def _check_live(model: nn.Module, options: dict[str, Any]) -> None:
    for name in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "mixed_precision"):
        if options.get(name):
            use = " and use every parameter, if only by 0 * p.sum()," if name == "find_unused_parameters" else ","
            raise BadInput(f"Live recovery does not support DDP's option {name}: leave it out{use} or choose restart.")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise BadInput(
                f"Live recovery does not support sparse gradients, which {name or 'the model'} has: leave out "
                "sparse=True, or choose restart."
            )
