"""Files of weights that others wrote, read without trust: nothing in them can run code.

A safetensors file is numbers. A file of `torch.save` is a pickle, read by torch's own restricted reader
(`weights_only=True`), which takes tensors and plain containers; what needs more is refused.
"""

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast import memory
from holdfast.checkpoint import payload
from holdfast.errors import BadInput, Corrupt


def read_safetensors(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file."""
    memory.require(str(path), path.stat().st_size)
    return payload.decode(np.fromfile(path, np.uint8), str(path))


def read_torch(path: Path, *, mapped: bool = False) -> Any:
    """What `torch.save` wrote, if it is tensors and plain containers; `mapped` if nobody reads the values of it now."""
    if not mapped:
        memory.require(str(path), path.stat().st_size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch thinks of the file, it raises too
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a stranger's file may make torch raise anything
        text = " ".join(str(error).split()).rpartition("WeightsUnpickler error: ")[2]
        if more := re.search(r"GLOBAL (\S+)", text):
            raise BadInput(
                f"{path} holds more than weights (a {more[1]:.80}), and to unpickle that could run code: save its "
                "state_dict alone, and name that file"
            ) from error
        raise Corrupt(
            f"{path} is not a whole file of torch.save ({type(error).__name__}: {text:.120}): name another, or copy it again"
        ) from error
