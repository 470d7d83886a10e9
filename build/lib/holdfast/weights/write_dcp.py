"""Write stored tensors to a folder of torch.distributed.checkpoint (DCP). One tensor at a time is in memory.

Torch's own writer keeps all tensors of a file in memory until the file is complete.
"""

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from holdfast.checkpoint.stored_tensor import StoredTensor, map_leaves


def write_folder(state: Mapping[str, Any], folder: Path) -> None:
    """Write a state_dict, or a dict of state_dicts, to a folder for `torch.distributed.checkpoint.load`."""
    stored: dict[int, StoredTensor] = {}
    stand_ins: list[torch.Tensor] = []  # keeps the ids in use

    def replaced(_: str, value: Any) -> Any:
        if not isinstance(value, StoredTensor):
            return value
        stand_ins.append(value.stand_in())
        stored[id(stand_ins[-1])] = value
        return stand_ins[-1]

    plan = map_leaves(dict(state), replaced)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is only one process
        try:
            save(plan, storage_writer=_Writer(folder), planner=_Planner(stored), no_dist=True)
        except CheckpointException as error:  # contains the error of each process
            raise error.failures[0][0] from error


class _Planner(DefaultSavePlanner):
    """PyTorch's planner of a save, for a state in which placeholder tensors stand in for stored tensors."""

    def __init__(self, stored: Mapping[int, StoredTensor]) -> None:
        super().__init__()
        self._stored = stored

    def position(self, item: WriteItem) -> int:
        stored = self._stored.get(id(super().lookup_object(item.index)))
        return -1 if stored is None else stored.position

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = super().lookup_object(index)
        stored = self._stored.get(id(value))
        return value if stored is None else torch.as_tensor(stored.read())


class _Writer(FileSystemWriter):
    """PyTorch's writer of a folder, reduced to a single file. Each value is written as soon as it is read."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert isinstance(planner, _Planner)
        name = f"{plan.storage_data.prefix}0.distcp"
        with (Path(self.path) / name).open("wb") as file:
            results = [_write(file, name, item, planner) for item in sorted(plan.items, key=planner.position)]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _write(file: Any, name: str, item: WriteItem, planner: SavePlanner) -> WriteResult:
    data, start = planner.resolve_data(item), file.tell()
    if isinstance(data, io.BytesIO):
        file.write(data.getbuffer())
    else:
        torch.save(data, file)
    length = file.tell() - start
    return WriteResult(index=item.index, size_in_bytes=length, storage_data=_StorageInfo(name, start, length))
