"""Host memory for collectives, reused in every step, because it takes longer to allocate memory than to copy the data."""

from collections import defaultdict

import torch


class HostMemory:
    """Tensors in host memory with undefined values: those that are kept until the next step, and those for a moment."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._taken: list[torch.Tensor] = []
        self._scratch: list[torch.Tensor] = []  # of bytes

    def take(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of `size` values, which the caller may use until `reclaim`."""
        free = self._free[size, dtype]
        self._taken.append(free.pop() if free else _new(size, dtype))
        return self._taken[-1]

    def reclaim(self) -> None:
        """Make all tensors that `take` has returned available again."""
        for taken in self._taken:
            self._free[taken.numel(), taken.dtype].append(taken)
        self._taken = []

    def borrow(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of `size` values, which the caller gives back soon, or forgets."""
        needed = size * dtype.itemsize
        memory = self._scratch.pop() if self._scratch else None
        if memory is None or memory.numel() < needed:
            memory = _new(needed, torch.uint8)
        return memory[:needed].view(dtype)

    def give_back(self, borrowed: torch.Tensor) -> None:
        """Make the memory of a borrowed tensor available again."""
        self._scratch.append(_new(0, torch.uint8).set_(borrowed.untyped_storage()))


@torch.inference_mode(False)  # an evaluation may need memory first, and training changes it in place
def _new(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype)
