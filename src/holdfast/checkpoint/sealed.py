"""JSON records with a digest of their own content, so that any changed byte is detected."""

import json
from typing import Any

import xxhash

from holdfast.errors import Corrupt, FutureVersion

FORMAT = 1
"""The version of everything written into a store. The seal is the same in every version."""


def seal(record: dict[str, Any]) -> bytes:
    """Return a record as bytes, with its format version and digest."""
    content = {"format": FORMAT, **record}
    return _canonical({**content, "digest": _digest(content)})


def unseal(data: bytes, name: str) -> dict[str, Any]:
    """Return the sealed record; raise Corrupt if a byte changed, or FutureVersion if a newer holdfast wrote it."""
    try:
        record = json.loads(data)
        digest = record.pop("digest")
        sound = digest == _digest(record) and data == _canonical({**record, "digest": digest})
        version = record["format"]
        if not is_count(version):
            raise TypeError("a format is a number")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise Corrupt(f"{name} is not a record of holdfast: fall back to an older snapshot.") from error
    if not sound:
        raise Corrupt(f"{name} does not match its own digest: fall back to an older snapshot.")
    if version != FORMAT:
        raise FutureVersion(f"{name} has format {version}, and this holdfast reads up to {FORMAT}: upgrade holdfast.")
    return dict(record)


def is_count(value: object) -> bool:
    """Return True if a JSON value is a count: an integer, not negative, and less than 2**63."""
    return type(value) is int and 0 <= value < 1 << 63


def _digest(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(_canonical(content))


def _canonical(content: dict[str, Any]) -> bytes:
    # Indented for people; sorted and compared byte by byte, so that damage to whitespace is detected too.
    return json.dumps(content, sort_keys=True, indent=2, allow_nan=False).encode() + b"\n"
