"""JSON records that protect themselves: each carries a digest of its own content, so that any changed byte shows."""

import json
from typing import Any

import xxhash

from holdfast.errors import Corrupt, FutureVersion

FORMAT = 1
"""The version of everything that is written into a store. The seal itself is the same in every version."""


def seal(record: dict[str, Any]) -> bytes:
    """A record as bytes, with its format version and digest."""
    content = {"format": FORMAT, **record}
    return _canonical({**content, "digest": _digest(content)})


def unseal(data: bytes, name: str) -> dict[str, Any]:
    """The record that was sealed, or Corrupt if a byte changed, or FutureVersion if a newer holdfast wrote it."""
    try:
        record = json.loads(data)
        digest = record.pop("digest")
        sound = digest == _digest(record) and data == _canonical({**record, "digest": digest})
        version = record["format"]
        if not is_count(version):
            raise TypeError("a format is a number")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise Corrupt(f"{name} is not a record of holdfast any more: fall back to an older save") from error
    if not sound:
        raise Corrupt(f"{name} does not match its own digest: fall back to an older save")
    if version != FORMAT:
        raise FutureVersion(f"{name} has format {version}, this holdfast reads up to {FORMAT}: upgrade holdfast")
    return dict(record)


def is_count(value: object) -> bool:
    """Whether a value out of JSON is a number of things: whole, not negative, and no larger than a file can be."""
    return type(value) is int and 0 <= value < 1 << 63


def _digest(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(_canonical(content))


def _canonical(content: dict[str, Any]) -> bytes:
    # Indented, because people read manifests; sorted and compared byte for byte, because bits rot in spaces too.
    return json.dumps(content, sort_keys=True, indent=2, allow_nan=False).encode() + b"\n"
