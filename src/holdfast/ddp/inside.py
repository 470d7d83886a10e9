"""Which replicated model is in its forward: torch.compile asks DDP for it when it compiles something inside.

DDP keeps it in an attribute of its class. To set one makes Python forget all that it has learned of the class, and every
look-up in it takes longer for a while: twice in every forward, which a small model feels. So ours are kept beside.
"""

from torch.nn.parallel import DistributedDataParallel

_now: list[DistributedDataParallel] = []
_others = DistributedDataParallel._get_active_ddp_module


def enter(model: DistributedDataParallel) -> None:
    """Its forward begins."""
    _now.append(model)


def leave() -> None:
    """The forward that began last has ended."""
    _now.pop()


def _innermost(_: type[DistributedDataParallel]) -> DistributedDataParallel | None:
    return _now[-1] if _now else _others()  # type: ignore[no-untyped-call]


DistributedDataParallel._get_active_ddp_module = classmethod(_innermost)  # type: ignore[method-assign, assignment]
