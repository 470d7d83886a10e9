"""The public namespace matches `__all__`, is imported lazily, and unpickles nothing."""

import subprocess
import sys
from pathlib import Path

import holdfast


def test_every_public_name_exists_and_has_a_docstring() -> None:
    for name in holdfast.__all__:
        value = getattr(holdfast, name)
        assert not callable(value) or value.__doc__, f"{name} has no docstring"


def test_every_public_name_is_offered_by_tab_completion() -> None:
    assert set(holdfast.__all__) <= set(dir(holdfast))


def test_the_supervisor_is_public() -> None:
    assert holdfast.supervise.supervise.__doc__
    assert holdfast.supervise.RunVerdict.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(holdfast, "unknown_name")
    assert not hasattr(holdfast.supervise, "unknown_name")


def test_the_command_starts_without_torch() -> None:
    code = "import sys, holdfast.cli, holdfast.lab.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


# Torch's restricted reader of weights, and a reader of DCP's index that knows the classes that one is made of.
RESTRICTED = [("dcp.py", "import pickle"), ("read_foreign.py", "torch.load")]


def test_nothing_is_ever_unpickled() -> None:
    source = Path(holdfast.__file__).parent
    words = ("import pickle", "torch.load", "allow_pickle=True", "cloudpickle")
    found = [(path.name, word) for path in source.rglob("*.py") for word in words if word in path.read_text()]
    assert sorted(found) == RESTRICTED
    assert (source / "weights/read_foreign.py").read_text().count("torch.load(") == 1
    assert "torch.load(file, map_location=device, weights_only=True" in (source / "weights/read_foreign.py").read_text()
    assert "pickle.load" not in (source / "weights/dcp.py").read_text()
