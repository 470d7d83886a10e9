"""`holdfast run -m package.train` runs a module with relative imports, as `python -m` does, also through failures."""

from collections.abc import Callable
from pathlib import Path

import pytest

from finished_run import different, events, failed_checks
from supervisor_process import Command, StartCommand

Holdfast = Callable[..., Command]

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


@pytest.fixture
def holdfast(start_command: StartCommand, package: Path) -> Holdfast:
    """A function that starts a command in the folder that holds the package."""
    return lambda *arguments: start_command(*arguments, cwd=package)


def test_a_killed_module_with_relative_imports_ends_with_the_bits_of_one_that_never_failed(
    holdfast: Holdfast, package: Path
) -> None:
    how = ("run", "-m", "project.train", "--workers", "2", "--save-every", "3")
    reference = holdfast(*how, "--out", "reference", "--", "--fast")
    assert reference.wait() == 0, reference.stderr
    assert "arguments ['--fast'] project" in reference.stdout
    killed = holdfast(*how, "--inject", "kill@7,rank=1", "--", "--fast")
    assert killed.wait() == 0, killed.stderr
    out = package / "runs" / "train"
    assert len(events(out, "restart")) == 1
    assert different(package / "reference", out) == []
    assert failed_checks(out) == []


def test_a_module_can_be_rehearsed(holdfast: Holdfast) -> None:
    result = holdfast("rehearse", "-m", "project.train", "--inject", "random=1,seed=1")
    assert result.wait() == 0, (result.stdout, result.stderr)
    assert "resumes exactly" in result.stdout


def test_an_error_of_a_module_is_shown_from_its_own_first_line_on(holdfast: Holdfast) -> None:
    result = holdfast("run", "-m", "project.broken")
    assert result.wait() == 1
    assert "broken.py" in result.stderr
    assert "cannot import name 'MISSING'" in result.stderr
    assert "runpy" not in result.stderr


@pytest.mark.parametrize("command", ["run", "rehearse"])
@pytest.mark.parametrize("name", ["project.absent", "absent.train", "project.parts", "project/train.py"])
def test_a_module_that_cannot_be_run_is_refused_in_one_line(holdfast: Holdfast, command: str, name: str) -> None:
    result = holdfast(command, "-m", name)
    assert result.wait() == 2
    assert f"there is no module {name} that can be run with -m" in result.stderr
    assert len(result.stderr.splitlines()) == 1
