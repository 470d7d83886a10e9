"""Digests of a state: of the protected objects in memory, and of the same state in a snapshot."""

import json

import torch
import xxhash

from holdfast.checkpoint.payload import FlatState
from holdfast.train.state.shards import local


def digest(flat: FlatState) -> str:
    """Return a digest of a flattened state; it does not depend on the device or the order of the tensors.

    For a distributed tensor, the digest covers only the part of this rank."""
    hasher = xxhash.xxh3_128(tree_digest(flat).encode())
    for name in sorted(flat.tensors):
        value = torch.as_tensor(local(flat.tensors[name])).detach()
        hasher.update(repr((name, value.dtype, tuple(value.shape))).encode())
        if value.numel():
            hasher.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return str(hasher.hexdigest())


def tree_digest(flat: FlatState) -> str:
    """Return a digest of everything in a flattened state except its tensors."""
    return str(xxhash.xxh3_128_hexdigest(json.dumps(flat.extra["state"]).encode()))


def snapshot_digest(tensors: str, tree: str) -> str:
    """Return the digest of a snapshot, given `tensors` and `tree`: the digests of its tensors and of its other state."""
    return str(xxhash.xxh3_128_hexdigest(f"{tensors} {tree}".encode()))
