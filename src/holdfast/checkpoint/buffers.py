"""Host memory that saves use again: an image holds the file of one snapshot as it will lie on the disk."""

import mmap
import sys
import threading

import numpy as np

from holdfast.blocks.division import Array
from holdfast.checkpoint import payload
from holdfast.checkpoint.payload import PayloadLayout
from holdfast.errors import BadInput


class Image:
    """Page-aligned memory for one snapshot's file: a disk takes it as it lies, a device sends to it at full speed."""

    def __init__(self, capacity: int) -> None:
        memory = mmap.mmap(-1, max(1, capacity), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if sys.platform == "linux":
            memory.madvise(mmap.MADV_HUGEPAGE)  # 512 times fewer page faults when it is filled for the first time
            memory.madvise(mmap.MADV_DONTFORK)  # or else every page is copied once more after a data loader has forked
        self.bytes = np.frombuffer(memory, np.uint8)
        self.pinned = False
        self._layout: PayloadLayout | None = None
        self._views: dict[str, Array] = {}

    @property
    def capacity(self) -> int:
        """How large a file it can hold."""
        return len(self.bytes)

    def lay_out(self, layout: PayloadLayout) -> dict[str, Array]:
        """The places of all values, to be filled in; they are made once and kept while the layout is the same."""
        if layout is not self._layout:
            self.bytes[: len(layout.header)] = np.frombuffer(layout.header, np.uint8)
            self._views = payload.decode(self.bytes[: layout.length], "image")
            self._layout = layout
        return self._views

    def touch(self) -> None:
        """Have the pages now that would else come one by one when it is filled for the first time."""
        self.bytes[:: mmap.PAGESIZE] = 0

    def file(self, layout: PayloadLayout) -> list[memoryview | bytes]:
        """The file, once its values are filled in."""
        return [self.bytes[: layout.length].data]


class BufferPool:
    """As many images as may be in use at a time, made when first needed, together within a budget of bytes."""

    def __init__(self, most: int, budget: int | None = None) -> None:
        if most < 1:
            raise BadInput(f"{most} saves in flight are none at all: allow 1 or more")
        self._most, self._budget = most, budget
        self._free: list[Image] = []
        self._made: list[Image] = []
        self._changed = threading.Condition()

    @property
    def bytes(self) -> int:
        """How much memory all images take together."""
        return sum(image.capacity for image in self._made)

    def take(self, size: int) -> Image:
        """An image with room for so many bytes; waits until there is one."""
        if self._budget is not None and size > self._budget:
            raise BadInput(
                f"a save takes {size} bytes of host memory and the budget is {self._budget}: "
                "raise the budget, or use the blocking writer, which takes none"
            )
        with self._changed:
            while True:
                for image in self._free:
                    if image.capacity >= size:
                        self._free.remove(image)
                        return image
                while self._free and not self._has_room(size):
                    self._made.remove(self._free.pop())  # too small, and in the way of one that is not
                if self._has_room(size):
                    self._made.append(image := Image(size))
                    return image
                self._changed.wait()

    def reserve(self, size: int, count: int) -> list[Image]:
        """Images with room for so many bytes, made until there are so many: whoever made them ready gives them back."""
        with self._changed:
            for image in [each for each in self._free if each.capacity < size]:
                self._free.remove(image)
                self._made.remove(image)
            reserved: list[Image] = []
            while len(self._made) < count and self._has_room(size):
                reserved.append(Image(size))
                self._made.append(reserved[-1])
            return reserved

    def give_back(self, image: Image) -> None:
        """Let another save use this image."""
        with self._changed:
            self._free.append(image)
            self._changed.notify()

    def clear(self) -> None:
        """Forget all images; none may be in use."""
        self._free.clear()
        self._made.clear()

    def _has_room(self, size: int) -> bool:
        within = self._budget is None or self.bytes + size <= self._budget
        return within and len(self._made) < self._most
