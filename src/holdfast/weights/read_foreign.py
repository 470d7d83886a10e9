"""Read weight files of other programs without trusting them: nothing in them can run code."""

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
    memory.require(str(path), path.stat().st_size)
    return payload.decode(np.fromfile(path, np.uint8), str(path))


def read_torch(path: Path, *, mapped: bool = False) -> Any:
    """Return the content of a `torch.save` file without running code in it; `mapped` memory-maps the tensors."""
    if not mapped:
        memory.require(str(path), path.stat().st_size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch also raises what it warns about
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
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
