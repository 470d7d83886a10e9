"""Export states to a file or folder that other programs read: safetensors, torch's own format, or torch's DCP.

The target appears complete or not at all. An existing target is replaced only with `force`. Tensors are read from the
snapshot one at a time, except for a `.pt` file, which torch writes at once.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.checkpoint.store import TEMPORARY, refusal
from holdfast.checkpoint.stored_tensor import map_leaves, of_tensor, read_all
from holdfast.errors import BadInput
from holdfast.weights.read_foreign import read_torch
from holdfast.weights.write_safetensors import parse_size, write_file, write_sharded

SAFETENSORS, TORCH = (".safetensors",), (".pt", ".pth")


def export(state: Mapping[str, Any], to: str, *, force: bool = False, shard_size: str | None = None) -> None:
    """Write a state_dict, or a dict of state_dicts, to the path `to`; `force` replaces an existing file.

    The suffix selects the format: `.safetensors` for one state_dict of tensors; `.pt` or `.pth` for a file that PyTorch
    loads with `weights_only=True`; and none for a folder for `torch.distributed.checkpoint.load`. With `shard_size`,
    such as 5GB, the folder is a Hugging Face model of safetensors files of at most that size."""
    write = writer_for(to, shard_size)
    with _replacing(Path(to), force=force) as place:
        write(map_leaves(state, _as_stored), place)


def writer_for(to: str, shard_size: str | None = None) -> Callable[[Mapping[str, Any], Path], None]:
    """Return the function that writes the format that the suffix of `to` selects; raise BadInput for other suffixes."""
    suffix = Path(to).suffix
    if to.endswith("/") or not suffix:
        return _folder_writer(shard_size)
    if shard_size:
        raise BadInput(f"--shard-size writes several files, and {to} is one: name a folder/.")
    if suffix in SAFETENSORS:
        return write_file
    if suffix in TORCH:
        return _write_torch
    raise BadInput(
        f"{to} has no known format: name a file that ends in {', '.join((*SAFETENSORS, *TORCH))}, or a folder/."
    )


def _folder_writer(shard_size: str | None) -> Callable[[Mapping[str, Any], Path], None]:
    if shard_size:
        size = parse_size(shard_size)
        return lambda state, folder: write_sharded(state, folder, size)
    from holdfast.weights.write_dcp import write_folder  # a slow import

    return write_folder


def _write_torch(state: Mapping[str, Any], place: Path) -> None:
    torch.save(map_leaves(read_all(state), lambda _, value: _plain(value)), place)
    read_torch(place)  # verifies that the file loads with weights_only=True


def _as_stored(_: str, value: Any) -> Any:
    tensor = _plain(value)
    return of_tensor(tensor) if isinstance(tensor, torch.Tensor) else value


def _plain(value: Any) -> Any:
    return torch.as_tensor(value) if isinstance(value, np.ndarray | np.generic) else value


@contextmanager
def _replacing(target: Path, *, force: bool) -> Iterator[Path]:
    """Yield a temporary path to write to, then rename it to `target`. If `target` exists, raise BadInput unless `force`."""
    if os.path.lexists(target) and not force:
        raise BadInput(f"{target} exists: name another, or give --force to replace it.")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _sync(temporary)
        if os.path.lexists(target) and not force:
            raise BadInput(f"{target} was written by another process meanwhile: name another.")
        if os.path.lexists(target) and (target.is_dir() or temporary.is_dir()):  # not replaceable by one rename
            aside = temporary.with_name(f"{temporary.name}.old")
            target.rename(aside)
            temporary.rename(target)
            _discard(aside)
        else:
            temporary.replace(target)
        _sync(target.parent)
    except OSError as error:
        raise refusal("write", target, error) from error
    finally:
        _discard(temporary)


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    for part in [*path.iterdir(), path] if path.name.endswith(TEMPORARY) and path.is_dir() else [path]:
        descriptor = os.open(part, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
