"""A model on every rank: the same start, and gradients summed over the ranks, each weighted by its share of the window.

The sum is layout-free. DDP reduces gradients in buckets, and learns a better order for them in the first backward
of every process; the ring behind an all-reduce adds up the ranks in an order that depends on where a value lies in
its bucket. So a resumed process, which has yet to learn, would round differently from one that was never stopped
(seen from three ranks and about a megabyte on). Ours is told the order before the first backward, and then learns no
other: it depends on nothing but the model.

Which replicated model is in its forward: torch.compile asks DDP for it when it compiles something inside.

DDP keeps it in an attribute of its class. To set one makes Python forget all that it has learned of the class, and every
look-up in it takes longer for a while: twice in every forward, which a small model feels. So ours are kept beside.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # it is public
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from holdfast import progress
from holdfast.errors import BadInput
from holdfast.live.recovery import LiveRecovery

now: list[DistributedDataParallel] = []
"""The replicated models that are in their forward, the innermost last."""
_others = DistributedDataParallel._get_active_ddp_module


def _innermost(_: type[DistributedDataParallel]) -> DistributedDataParallel | None:
    return now[-1] if now else _others()  # type: ignore[no-untyped-call]


DistributedDataParallel._get_active_ddp_module = classmethod(_innermost)  # type: ignore[method-assign, assignment]


class Replica:
    """One replicated model: how its gradients are weighted, and how often they were summed."""

    def __init__(
        self,
        model: nn.Module,
        options: dict[str, Any],
        live: LiveRecovery | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._live, self._meanwhile = live, meanwhile
        self._group = live.new_group(self._after_gradient) if live else None
        self.reduced = 0
        """Backward passes whose gradients are summed over the ranks."""
        self.held = 0
        """Backward passes whose gradients stay on this rank until a later one is summed."""
        self.holds_back = False
        """Whether gradients of this rank alone wait for a backward whose gradients are summed."""
        self._summed: bool | None = None  # of the backward that is due: whether it will be; nothing if none is
        if self._group:
            _check_live(model, options)
            options = {**options, "process_group": self._group}
        self.ddp = _Settled(model, self.before_forward, self._live, **options)
        self.ddp.settle()
        if self._group:
            self._group.lay_out([each.parameters() for each in self.ddp.reducer._get_zeros_like_grad_buckets()])
        self._weight = 1.0 / self.ddp.process_group.size()  # what DDP gives every rank by itself
        self._post: Callable[[torch.Tensor, int], Any] = self._all_reduce
        self._is_hooked = False
        if not self._group:  # with a group of ours a hook would do, too, but every call from backward takes its time
            self._hook()

    @property
    def weight(self) -> float:
        """By what this rank's gradients are multiplied before they are summed; to be set before the first backward."""
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        if (
            self._group is None and weight != self._weight
        ):  # else DDP multiplies while it fills its buckets, which costs nothing
            self._weight = weight
            self.ddp.sum_with(self._sum)

    def _sum(self, _: None, bucket: GradBucket) -> Future[torch.Tensor]:
        gradients = bucket.buffer().mul_(self._weight)
        future = self._post(gradients, bucket.index()).get_future()
        summed: Future[torch.Tensor] = future.then(lambda done: done.value()[0])
        return summed

    def _all_reduce(self, values: torch.Tensor, _: int) -> Any:
        return dist.all_reduce(values, group=self.ddp.process_group, async_op=True)

    def watch(self, posted: Callable[[Sequence[Any], int], None]) -> None:
        """Tell, before the first sum of every backward and with each, which are under way and how many there will be."""
        if self._group:
            self._group.watch = posted
            return
        if self.ddp.mixed_precision:
            raise BadInput("no failure can strike in the backward of a model with DDP's option mixed_precision")
        works: list[Any] = []
        buckets = len(self.ddp.reducer._get_zeros_like_grad_buckets())

        def post(values: torch.Tensor, number: int) -> Any:
            if number == 0:
                works.clear()
                posted(works, buckets)
            works.append(self._all_reduce(values, number))
            posted(works, buckets)
            return works[-1]

        self._post = post
        self.ddp.sum_with(self._sum)

    def _hook(self) -> None:
        """Be called in every backward."""
        for each in self.ddp.last_to_come():
            _accumulator(each).register_hook(self._after_gradient)  # after DDP's own hook, which begins the sum
        self._is_hooked = True

    def before_forward(self, is_summed: bool) -> None:
        """DDP decides before a forward whether the gradients of its backward are summed."""
        self._summed = is_summed
        if not (is_summed or self._is_hooked):
            self._hook()
        if self._group and is_summed:
            self._group.begin()

    def _after_gradient(self, *_: Any) -> None:
        """All gradients have come, and the last sum has begun, if there are any: the first call of a backward counts."""
        summed, self._summed = self._summed, None
        if summed:
            self.reduced += 1
            self.holds_back = False
            progress.here.posts()  # its own gradients are computed: from here on it can only wait for peers
            self._meanwhile()
        elif summed is not None:
            self.held += 1
            self.holds_back = True


class _Settled(DistributedDataParallel):
    """DDP whose buckets are final before the first backward.

    With `find_unused_parameters` they are so by themselves. Else DDP puts everything into one bucket at first, and
    then builds buckets in the order in which gradients came. We have it build them at once, from the last parameter to
    the first, which is about the order in which gradients come.
    """

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
        self._is_final = self._is_ours = self._is_plain = False
        super().__init__(module, find_unused_parameters=find_unused_parameters, static_graph=static_graph, **options)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """DDP's own, with what we count. Not a hook: a module with hooks takes the long way through torch."""
        summed, learns = self.require_backward_grad_sync, torch.is_grad_enabled()
        if learns:
            self._before_forward(summed)
        else:
            progress.here.evaluates()
        if summed and learns and self._may_be_plain():
            return self._plain_forward(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _may_be_plain(self) -> bool:
        """Whether DDP's own forward has run once: the first one sets up optimizers that step inside backward."""
        usual = self._is_plain and self._lazy_init_ran
        return usual and not (self._join_config.enable or torch.compiler.is_compiling())

    def _plain_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What DDP's forward does where buckets are final and nothing is moved, cast, broadcast or looked for.

        DDP makes sure of all that anew in every forward, which takes longer than a small model.
        """
        self.reducer.prepare_for_forward()
        now.append(self)
        try:
            output = self._modules["module"](*inputs, **kwargs)  # type: ignore[misc]  # `self.module` is looked for first
        finally:
            now.pop()
        if not self.require_forward_param_sync:  # to set an attribute of a module takes long
            self.require_forward_param_sync = True
        self.reducer.prepare_for_backward([])
        return output

    def _sync_buffers(self) -> None:
        progress.here.posts()  # all wait for rank 0
        if self._live is None:
            super()._sync_buffers()  # type: ignore[no-untyped-call]
        else:
            self._live.sync_buffers(super()._sync_buffers, self.modules_buffers)

    def settle(self) -> None:
        """Build the final buckets; DDP does so once."""
        if self._rebuilds:
            self.reducer._push_all_rebuilt_params()
            self._has_rebuilt_buckets = self.reducer._rebuild_buckets()
        self._is_final = True
        broadcasts = self.broadcast_buffers and self.modules_buffers
        special = self.device_ids or self.mixed_precision or self._delay_all_reduce_all_params or broadcasts
        self._is_plain = self._all_used and not special

    def last_to_come(self) -> list[nn.Parameter]:
        """Parameters of which one has a gradient late in every backward: the first, or any where some may be unused."""
        parameters, _ = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return list(parameters[:1] if self._all_used else parameters)

    def sum_with(self, hook: Any) -> None:
        """Have our own hook sum the buckets, from now on."""
        if not self._is_ours:
            super().register_comm_hook(None, hook)
        self._is_ours = True

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Refused once the buckets are final: the sums of a user's hook would not be weighted by share."""
        if self._is_final:
            raise BadInput("a replicated model sums its gradients itself: leave out register_comm_hook")
        super().register_comm_hook(state, hook)  # DDP's own, for its option mixed_precision

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return (parameters[::-1], sparse[::-1]) if self._rebuilds else (parameters, sparse)


def _check_live(model: nn.Module, options: dict[str, Any]) -> None:
    for name in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "mixed_precision"):
        if options.get(name):
            use = " and use every parameter, if only by 0 * p.sum()," if name == "find_unused_parameters" else ","
            raise BadInput(f"live recovery does not go with DDP's option {name}: leave it out{use} or choose restart")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise BadInput(
                f"live recovery does not go with sparse gradients, and {name or 'the model'} has such: leave out "
                "sparse=True, or choose restart"
            )


def _accumulator(parameter: nn.Parameter) -> Node:
    """Where the gradient of a parameter ends in every backward; DDP keeps it."""
    with torch.enable_grad():
        view = parameter.expand_as(parameter)
    assert view.grad_fn is not None
    accumulator = view.grad_fn.next_functions[0][0]
    assert accumulator is not None
    return accumulator


def holding_back(replicas: Iterable[Replica]) -> ExitStack:
    """A context in which backward adds up gradients on this rank alone."""
    with ExitStack() as stack:
        for each in replicas:
            stack.enter_context(each.ddp.no_sync())
        return stack.pop_all()
