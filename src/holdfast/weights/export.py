"""A state as a file or folder that other programs read: safetensors, torch's own format, or torch's DCP.

What is written appears whole or not at all, and never in the place of something else unless that is asked for.
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
    """Write a state_dict, or several by name, in the format that the name of the file or folder says.

    `.safetensors` holds the tensors of one state_dict. Torch loads a `.pt` file with `weights_only=True`. A name
    without an ending is a folder, for `torch.distributed.checkpoint.load`.
    """
    write = writer_for(to)
    with _placed(Path(to), force=force) as place:
        write(_plain(state), place)


def writer_for(to: str) -> Callable[[Mapping[str, Any], Path], None]:
    """How a file of this name is written; a name that says no format is refused."""
    ending = Path(to).suffix
    if to.endswith("/") or not ending:
        return _write_folder
    if ending in SAFETENSORS:
        return _write_safetensors
    if ending in TORCH:
        return _write_torch
    raise BadInput(
        f"{to} does not say its format: name a file that ends in {', '.join((*SAFETENSORS, *TORCH))}, or a folder/"
    )


def _write_safetensors(state: Mapping[str, Any], place: Path) -> None:
    if others := [str(key) for key, value in state.items() if not isinstance(value, torch.Tensor)]:
        raise BadInput(
            f"a safetensors file holds tensors by name and nothing else, and {', '.join(others[:4])} "
            f"{'is none' if len(others) == 1 else 'are none'}: name one model, or write a .pt file or a folder/"
        )
    with place.open("wb") as file:
        for part in payload.encode(dict(state), {"format": "pt"}):
            file.write(part)


def _write_torch(state: Mapping[str, Any], place: Path) -> None:
    torch.save(state, place)
    read_torch(place, mapped=True)  # whoever loads it is to need no more trust than we do


def _write_folder(state: Mapping[str, Any], place: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save  # it takes a while to import

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process: so it is meant
        save(dict(state), checkpoint_id=place, no_dist=True)


def _plain(value: Any) -> Any:
    """The same state with tensors for numpy's arrays and numbers, which readers of plain weights do not take."""
    if isinstance(value, np.ndarray | np.generic):
        return torch.as_tensor(value)
    if isinstance(value, Mapping):
        plain = type(value)({key: _plain(item) for key, item in value.items()})  # type: ignore[call-arg]
        if hasattr(value, "__dict__"):
            vars(plain).update(vars(value))
        return plain
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


@contextmanager
def _placed(target: Path, *, force: bool) -> Iterator[Path]:
    """A name beside the target to write to; what is there in the end becomes the target, in one step."""
    if os.path.lexists(target) and not force:
        raise BadInput(f"{target} exists: name another, or give --force to replace it")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _sync(temporary)
        _publish(temporary, target, force=force)
        _sync(target.parent)
    except OSError as error:
        raise refusal("write", target, error) from error
    finally:
        _discard(temporary)


def _publish(temporary: Path, target: Path, *, force: bool) -> None:
    if os.path.lexists(target):
        if not force:
            raise BadInput(f"{target} was written by somebody else meanwhile: name another")
        if target.is_dir() or temporary.is_dir():  # nothing takes the place of a folder in one step
            aside = temporary.with_name(f"{temporary.name}.old")
            target.rename(aside)
            temporary.rename(target)
            _discard(aside)
            return
    temporary.replace(target)


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Have it on the disk: a file, or a folder with its files."""
    for each in [*path.iterdir(), path] if path.name.endswith(TEMPORARY) and path.is_dir() else [path]:
        number = os.open(each, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
