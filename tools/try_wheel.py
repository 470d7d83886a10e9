"""Build the wheel, install it into an empty virtual environment and run it: `python tools/try_wheel.py [PYTHON ...]`.

PYTHON are interpreters, such as python3.12; the default is the one that runs this tool. For each, the wheel is installed
from the package index with the versions of constraints.txt. Then the loop of the README is trained by two workers, of
which one is killed, and audited.
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WITHIN = 1800.0  # seconds for each command: torch is downloaded
WANTED = ("holdfast/py.typed", "holdfast/report/page.html")
LOOP = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)[1]  # type: ignore[index]
RUN = ("run", "--workers", "2", "--inject", "kill@6,rank=1", "--out", "runs/a", "train.py")


def build(folder: Path) -> Path:
    """Build the wheel in `folder` and return its path. Raise SystemExit if a file is missing in it."""
    _call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (wheel,) = folder.glob("holdfast-*.whl")
    if missing := set(WANTED) - set(zipfile.ZipFile(wheel).namelist()):
        raise SystemExit(f"{wheel.name} lacks {', '.join(sorted(missing))}.")
    return wheel


def try_with(python: str, wheel: Path, folder: Path) -> str:
    """Install the wheel in a new environment of `python`, train with it, and return one line about the result."""
    _call(python, "-m", "venv", str(folder / "venv"))
    here = folder / "venv/bin"
    constraints = str(ROOT / "constraints.txt")
    _call(str(here / "python"), "-m", "pip", "install", "--quiet", "--constraint", constraints, str(wheel))
    (folder / "train.py").write_text(LOOP)
    ran = _call(str(here / "holdfast"), *RUN, cwd=folder)
    audited = _call(str(here / "holdfast"), "audit", "runs/a", cwd=folder)
    if "completed after 2 attempts" not in ran or not audited.endswith("audit: pass\n"):
        raise SystemExit(f"{python}: the run did not survive the kill:\n{ran}{audited}")
    version = _call(str(here / "python"), "--version").strip()
    return f"{version}: {wheel.name} installs, survives a kill and passes its audit"


def _call(*command: str, cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN, cwd=cwd, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main(pythons: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="holdfast-wheel-") as folder:
        wheel = build(Path(folder))
        for number, python in enumerate(pythons):
            place = Path(folder) / str(number)
            place.mkdir()
            print(try_with(python, wheel, place), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or [sys.executable])
