"""Read files of torch.save without trusting them: nothing in them can run code."""

import re
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from holdfast import memory
from holdfast.errors import BadInput, Corrupt


def read_torch(path: Path) -> Any:
    """Return the content of a `torch.save` file without running code in it.

    Tensors are read from the file when their values are used, unless torch before version 1.6 wrote the file."""
    is_mapped = zipfile.is_zipfile(path)
    if not is_mapped:
        memory.require(str(path), path.stat().st_size)
    try:
        return restricted_load(path, mapped=is_mapped)
    except Exception as error:  # an untrusted file may make torch raise anything
        text = " ".join(str(error).split()).rpartition("WeightsUnpickler error: ")[2]
        if more := re.search(r"GLOBAL (\S+)", text):
            raise BadInput(
                f"{path} holds more than weights (a {more[1]:.80}), and unpickling that could run code: save its "
                "state_dict alone, and name that file."
            ) from error
        raise Corrupt(
            f"{path} is not a complete file of torch.save ({type(error).__name__}: {text:.120}): name another, or copy it again."
        ) from error


def restricted_load(file: Path | IO[bytes], *, device: str = "cpu", mapped: bool = False) -> Any:
    """Return the content of a `torch.save` file. Torch's restricted unpickler refuses everything but tensors.

    On the device "meta", tensors have no values. `mapped` memory-maps the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch also raises what it warns about
        return torch.load(file, map_location=device, weights_only=True, mmap=mapped)
