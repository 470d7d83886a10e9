"""Windows whose samples the script draws itself, as from random offsets into a text.

The run counts them, and keys the generators before every one: a window that is trained again draws the same samples,
with as many ranks. Which samples those are, nobody but the script knows.
"""

LONG = 1 << 20  # windows that an epoch has: whichever there are, so that a run can be extended


class Draws:
    """Stands for so many samples of which the run knows nothing but that they are to be drawn."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices
