"""Code of installed packages is told from code of the user, wherever the packages are installed."""

import json
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from holdfast import libraries
from holdfast.libraries import is_of_library


@pytest.mark.parametrize("module", [json, numpy, torch, torch.distributed, pytest])
def test_the_modules_of_python_and_of_installed_packages_are_of_a_library(module: object) -> None:
    assert is_of_library(str(getattr(module, "__file__", "")))


@pytest.mark.parametrize(
    "folder",
    [
        "/usr/local/lib/python3.12/dist-packages",  # a container image
        "/home/someone/.local/lib/python3.12/site-packages",  # pip install --user
        "/opt/base/lib/python3.11/site-packages",  # of the system, seen from a virtual environment
    ],
)
def test_packages_outside_of_this_environment_are_libraries(folder: str) -> None:
    assert is_of_library(f"{folder}/torch/distributed/distributed_c10d.py")


def test_a_build_of_torch_from_source_is_a_library(tmp_path: Path) -> None:
    (tmp_path / "src" / "torch").mkdir(parents=True)
    (tmp_path / "src" / "torch" / "__init__.py").touch()
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path / "src")!r})
from holdfast.libraries import is_of_library
assert is_of_library({str(tmp_path / "src" / "torch" / "nn" / "__init__.py")!r})
assert not is_of_library({str(tmp_path / "src" / "train.py")!r})
"""
    (tmp_path / "holdfast").mkdir()  # holdfast's own modules import torch
    (tmp_path / "holdfast" / "libraries.py").write_bytes(Path(libraries.__file__).read_bytes())
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, timeout=60)


def test_a_script_is_not_of_a_library(tmp_path: Path) -> None:
    assert not is_of_library(str(tmp_path / "train.py"))
    assert not is_of_library("train.py")
