"""`holdfast run -m package.train` runs a module with relative imports, as `python -m` does, also through failures."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from finished_run import different, events, failed_checks

MODEL = "import torch\n\n\ndef network():\n    return torch.nn.Linear(8, 3)\n"
TRAIN = """
import sys
import torch
import torch.nn.functional as F
import holdfast as hf
from . import settings
from .parts.model import network

run = hf.attach()
print("arguments", sys.argv[1:], __package__, flush=True)
x, y = torch.randn(48, 8), torch.randint(3, (48,))
model = run.replicate(network())
optimizer = torch.optim.AdamW(model.parameters(), lr=settings.RATE)
run.protect(model=model, optimizer=optimizer)
for inputs, targets in run.batches(torch.utils.data.TensorDataset(x, y), global_batch=8, num_epochs=2):
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a package `project` whose module `train` imports from its siblings."""
    files = {
        "__init__.py": "",
        "settings.py": "RATE = 0.01\n",
        "train.py": TRAIN,
        "broken.py": "from .settings import MISSING\n",
        "parts/__init__.py": "",
        "parts/model.py": MODEL,
    }
    for name, text in files.items():
        file = tmp_path / "project" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return tmp_path


def holdfast(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180, env=os.environ.copy())


def test_a_killed_module_with_relative_imports_ends_with_the_bits_of_one_that_never_failed(package: Path) -> None:
    how = ("run", "-m", "project.train", "--workers", "2", "--save-every", "3")
    reference = holdfast(package, *how, "--out", "reference", "--", "--fast")
    assert reference.returncode == 0, reference.stderr
    assert "arguments ['--fast'] project" in reference.stdout
    killed = holdfast(package, *how, "--inject", "kill@7,rank=1", "--", "--fast")
    assert killed.returncode == 0, killed.stderr
    out = package / "runs" / "train"
    assert len(events(out, "restart")) == 1
    assert different(package / "reference", out) == []
    assert failed_checks(out) == []


def test_a_module_can_be_rehearsed(package: Path) -> None:
    result = holdfast(package, "rehearse", "-m", "project.train", "--inject", "random=1,seed=1")
    assert result.returncode == 0, (result.stdout, result.stderr)
    assert "resumes exactly" in result.stdout


def test_an_error_of_a_module_is_shown_from_its_own_first_line_on(package: Path) -> None:
    result = holdfast(package, "run", "-m", "project.broken")
    assert result.returncode == 1
    assert "broken.py" in result.stderr
    assert "cannot import name 'MISSING'" in result.stderr
    assert "runpy" not in result.stderr


@pytest.mark.parametrize("command", ["run", "rehearse"])
@pytest.mark.parametrize("name", ["project.absent", "absent.train", "project.parts", "project/train.py"])
def test_a_module_that_cannot_be_run_is_refused_in_one_line(package: Path, command: str, name: str) -> None:
    result = holdfast(package, command, "-m", name)
    assert result.returncode == 2
    assert f"there is no module {name} that can be run with -m" in result.stderr
    assert len(result.stderr.splitlines()) == 1
