"""The order of an epoch's samples as text for events: sample ids in base64, in pieces of a limited length."""

import base64
import binascii
from collections.abc import Iterator

import numpy as np
import xxhash

from holdfast.blocks.division import Ids
from holdfast.errors import Corrupt

PIECE = 1 << 17  # ids in one event: at most 1.4 MB of text
_WIDTHS = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<i8"}  # bytes per id


def digest(order: Ids) -> str:
    """Return a digest of the sample ids of an epoch, which depends on their order."""
    return str(xxhash.xxh3_128_hexdigest(np.ascontiguousarray(order, "<i8").tobytes()))


def pieces(order: Ids) -> Iterator[tuple[int, int, str]]:
    """Yield the sample ids of an epoch in pieces: (index of the first id, bytes per id, ids as text)."""
    largest = int(order.max(initial=0))
    width = next(width for width in _WIDTHS if width == 8 or largest < 1 << 8 * width)
    for first in range(0, len(order), PIECE):
        piece = order[first : first + PIECE].astype(_WIDTHS[width])
        yield first, width, base64.b64encode(piece.tobytes()).decode()


def read_piece(width: int, text: str) -> Ids:
    """Decode the sample ids in `text`, with `width` bytes for each id; raise Corrupt if the text is damaged."""
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), _WIDTHS[width]).astype(np.int64)
    except (KeyError, ValueError, binascii.Error) as error:
        raise Corrupt(f"not a piece of the order of an epoch: {text!r:.40}.") from error
