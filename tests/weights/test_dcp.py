"""Reading a folder of torch.distributed.checkpoint."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from holdfast.errors import BadInput
from holdfast.weights.dcp import read_dcp


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one tensor of 4 kB."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is only one process
        dcp.save({"weight": torch.arange(1024.0)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_a_folder_that_does_not_fit_into_memory_is_not_called_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert torch.equal(torch.as_tensor(read_dcp(folder)["weight"].read()), torch.arange(1024.0))
    monkeypatch.setattr("holdfast.memory.available", lambda: 1000)
    with pytest.raises(BadInput, match="needs 4096 bytes of memory and only 1000 are free"):
        read_dcp(folder)["weight"].read()
