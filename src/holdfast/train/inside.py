"""Which replicated model is in its forward: torch.compile asks DDP for it when it compiles something inside.

DDP keeps it in an attribute of its class. To set one makes Python forget all that it has learned of the class, and every
look-up in it takes longer for a while: twice in every forward, which a small model feels. So ours are kept beside.
"""

from torch.nn.parallel import DistributedDataParallel

now: list[DistributedDataParallel] = []
"""The replicated models that are in their forward, the innermost last."""
_others = DistributedDataParallel._get_active_ddp_module


def _innermost(_: type[DistributedDataParallel]) -> DistributedDataParallel | None:
    return now[-1] if now else _others()  # type: ignore[no-untyped-call]


DistributedDataParallel._get_active_ddp_module = classmethod(_innermost)  # type: ignore[method-assign, assignment]
