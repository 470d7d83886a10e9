"""Export a state to a file or folder that other programs read: safetensors, torch's own format, or torch's DCP.

The target appears complete or not at all. An existing target is replaced only with `force`.
"""

import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.checkpoint import payload
from holdfast.checkpoint.store import TEMPORARY, refusal
from holdfast.errors import BadInput
from holdfast.weights.read_foreign import read_torch

SAFETENSORS, TORCH = (".safetensors",), (".pt", ".pth")


def export(state: Mapping[str, Any], to: str, *, force: bool = False) -> None:
    """Write a state_dict, or a dict of state_dicts, to the path `to`; `force` replaces an existing file.

    The suffix selects the format: `.safetensors` for one state_dict of tensors; `.pt` or `.pth` for a file that PyTorch
    loads with `weights_only=True`; and none for a folder for `torch.distributed.checkpoint.load`."""
    write = writer_for(to)
    with _replacing(Path(to), force=force) as place:
        write(_plain(state), place)


def writer_for(to: str) -> Callable[[Mapping[str, Any], Path], None]:
    """Return the function that writes the format selected by the suffix of the path `to`; raise BadInput if unknown."""
    suffix = Path(to).suffix
    if to.endswith("/") or not suffix:
        return _write_folder
    if suffix in SAFETENSORS:
        return _write_safetensors
    if suffix in TORCH:
        return _write_torch
    raise BadInput(
        f"{to} has no known format: name a file that ends in {', '.join((*SAFETENSORS, *TORCH))}, or a folder/."
    )


def _write_safetensors(state: Mapping[str, Any], place: Path) -> None:
    if others := [str(key) for key, value in state.items() if not isinstance(value, torch.Tensor)]:
        raise BadInput(
            f"a safetensors file can hold only tensors, and {', '.join(others[:4])} "
            f"{'is not one' if len(others) == 1 else 'are not'}: name one model, or write a .pt file or a folder/."
        )
    with place.open("wb") as file:
        for part in payload.encode(dict(state), {"format": "pt"}):
            file.write(part)


def _write_torch(state: Mapping[str, Any], place: Path) -> None:
    torch.save(state, place)
    read_torch(place, mapped=True)  # verifies that the file loads with weights_only=True


def _write_folder(state: Mapping[str, Any], place: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save  # a slow import

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is only one process
        save(dict(state), checkpoint_id=place, no_dist=True)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return torch.as_tensor(value)
    if isinstance(value, Mapping):
        plain = type(value)({key: _plain(item) for key, item in value.items()})  # type: ignore[call-arg]
        if hasattr(value, "__dict__"):
            vars(plain).update(vars(value))
        return plain
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


@contextmanager
def _replacing(target: Path, *, force: bool) -> Iterator[Path]:
    """Yield a temporary path to write to, then rename it to `target`; raise BadInput if that exists, unless `force`."""
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
