"""Reusable host memory for saves: an image holds the file of one snapshot as it will be on the disk."""

import mmap
import sys
import threading

import numpy as np

from holdfast.blocks.division import Array
from holdfast.checkpoint import payload
from holdfast.checkpoint.payload import PayloadLayout
from holdfast.errors import BadInput


class Image:
    """Page-aligned memory for the file of one snapshot, for direct writes to a disk and fast copies from a device."""

    def __init__(self, capacity: int) -> None:
        memory = mmap.mmap(-1, max(1, capacity), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if sys.platform == "linux":
            memory.madvise(mmap.MADV_HUGEPAGE)  # 512 times fewer page faults when it is filled for the first time
            memory.madvise(mmap.MADV_DONTFORK)  # otherwise a fork of a data loader makes the next write copy every page
        self.bytes = np.frombuffer(memory, np.uint8)
        self.pinned = False
        self._layout: PayloadLayout | None = None
        self._views: dict[str, Array] = {}

    @property
    def capacity(self) -> int:
        """The size of the largest file that fits."""
        return len(self.bytes)

    def lay_out(self, layout: PayloadLayout) -> dict[str, Array]:
        """Return a view of the place of every value; the views are kept while the layout is the same."""
        if layout is not self._layout:
            self.bytes[: len(layout.header)] = np.frombuffer(layout.header, np.uint8)
            self._views = payload.decode(self.bytes[: layout.length], "image")
            self._layout = layout
        return self._views

    def touch(self) -> None:
        """Allocate all pages now, instead of one by one when the image is first filled."""
        self.bytes[:: mmap.PAGESIZE] = 0

    def file(self, layout: PayloadLayout) -> list[memoryview | bytes]:
        """Return the bytes of the file, when its values are filled in."""
        return [self.bytes[: layout.length].data]


class BufferPool:
    """A limited number of images, allocated when first needed, together within a budget of bytes."""

    def __init__(self, most: int, budget: int | None = None) -> None:
        if most < 1:
            raise BadInput(f"the number of saves in flight must be 1 or more (got {most}).")
        self._most, self._budget = most, budget
        self._free: list[Image] = []
        self._made: list[Image] = []
        self._changed = threading.Condition()

    @property
    def bytes(self) -> int:
        """The bytes of all images together."""
        return sum(image.capacity for image in self._made)

    def take(self, size: int) -> Image:
        """Return an image for `size` bytes; wait until one is free."""
        if self._budget is not None and size > self._budget:
            raise BadInput(
                f"a save needs {size} bytes of host memory and the budget is {self._budget}: "
                "raise the budget, or use the blocking writer, which needs none."
            )
        with self._changed:
            while True:
                for image in self._free:
                    if image.capacity >= size:
                        self._free.remove(image)
                        return image
                while self._free and not self._has_room(size):
                    self._made.remove(self._free.pop())  # too small, and it counts towards the limit
                if self._has_room(size):
                    self._made.append(image := Image(size))
                    return image
                self._changed.wait()

    def reserve(self, size: int, count: int) -> list[Image]:
        """Allocate images for `size` bytes until there are `count`; the caller gives them back when they are ready."""
        with self._changed:
            for image in [image for image in self._free if image.capacity < size]:
                self._free.remove(image)
                self._made.remove(image)
            reserved: list[Image] = []
            while len(self._made) < count and self._has_room(size):
                reserved.append(Image(size))
                self._made.append(reserved[-1])
            return reserved

    def give_back(self, image: Image) -> None:
        """Make the image available to another save."""
        with self._changed:
            self._free.append(image)
            self._changed.notify()

    def clear(self) -> None:
        """Drop all images; none may be in use."""
        self._free.clear()
        self._made.clear()

    def _has_room(self, size: int) -> bool:
        within = self._budget is None or self.bytes + size <= self._budget
        return within and len(self._made) < self._most
