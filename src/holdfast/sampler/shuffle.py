"""A keyed pseudorandom permutation of 0..size-1, which computes any element without storing the others.

It is a Feistel network on a table of 2^h rows and just enough columns. Each round moves every element within its
column, or within its row, by a distance mixed from the key and the number of that column or row. This is one-to-one
whatever the mixing. An element that lands at `size` or beyond goes through the network again until it lands inside
(cycle walking). Less than one column lies outside, so this is rare. The permutation mixes well but is not cryptography.

The arithmetic is a data format: with another constant or number of rounds, all older histories would fail their audit.
"""

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Ids
from holdfast.errors import BadInput

LARGEST = 1 << 48
_Words = npt.NDArray[np.uint64]
# The constants of splitmix64 (Steele et al., 2014).
_STEP, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def permuted(indexes: npt.ArrayLike, size: int, key: npt.ArrayLike) -> Ids:
    """Apply a pseudorandom permutation of 0..size-1 to each of the `indexes`.

    `key` selects the permutation. It is one number, or an array with a number for each index."""
    if not 1 <= size <= LARGEST:
        raise BadInput(f"A permutation must have 1 to {LARGEST} elements (got {size}).")
    places = np.asarray(indexes, dtype=np.int64)
    if places.size and not 0 <= places.min() <= places.max() < size:
        raise BadInput(f"Indexes from {places.min()} to {places.max()} are not all in 0..{size - 1}.")
    flat = np.atleast_1d(places).astype(np.uint64)
    keys = np.asarray(key, dtype=np.uint64)
    x = _through(flat, size, keys)
    while (outside := x >= np.uint64(size)).any():
        x[outside] = _through(x[outside], size, np.broadcast_to(keys, x.shape)[outside])
    return x.view(np.int64).reshape(places.shape)


def mixed(words: npt.ArrayLike) -> _Words:
    """Apply splitmix64's output function: one-to-one on 64 bits, and every output bit depends on every input bit."""
    x = np.atleast_1d(np.asarray(words, dtype=np.uint64)) + _STEP  # arrays wrap without a warning; scalars warn
    x = (x ^ x >> np.uint64(30)) * _FIRST
    x = (x ^ x >> np.uint64(27)) * _SECOND
    return x ^ x >> np.uint64(31)


def _through(x: _Words, size: int, keys: _Words) -> _Words:
    """Apply the Feistel network once to each element of `x` with its key in `keys`; results may exceed `size` - 1."""
    height = ((size - 1).bit_length() + 1) // 2
    width = -(-size >> height)
    shift, mask, columns = np.uint64(height), np.uint64((1 << height) - 1), np.uint64(width)
    # Two rounds divide the unevenness of orders by about the size from 16 elements on, but only by four among eight.
    rounds = 10 if size >= 64 else 32
    # The keys of the rounds, used in pairs, are the next outputs of splitmix64 started at each key.
    numbers = _STEP * np.arange(rounds, dtype=np.uint64).reshape(rounds, *[1] * keys.ndim)
    round_keys = mixed(numbers + keys)
    # A fraction of 64 - bits bits times the width fits 64 bits, and its whole part is below the width.
    bits, rest = np.uint64(width.bit_length()), np.uint64(64 - width.bit_length())
    row, column = x & mask, x >> shift
    for row_key, column_key in zip(round_keys[0::2], round_keys[1::2], strict=True):
        # Adding, not xor, moves within a column: with xor only even permutations could be reached.
        distance = _hashed(column, row_key)  # computed in place, so that it stays in the processor's cache
        distance >>= np.uint64(32)
        row += distance
        row &= mask
        distance = _hashed(row, column_key)
        distance >>= bits
        distance *= columns
        distance >>= rest
        column += distance
        np.minimum(column, column - columns, out=column)  # modulo: a negative number wraps to a large one
    column <<= shift
    column |= row
    return column


def _hashed(numbers: _Words, keys: _Words) -> _Words:
    """Hash each of `numbers`, with the key at the same index of `keys`, to a 64-bit word."""
    x = numbers ^ keys
    x *= _FIRST
    x ^= x >> np.uint64(32)
    x *= _SECOND
    return x
