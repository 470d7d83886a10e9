"""The installed package: a small core that trains, proves and measures; everything else is an extra."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path
from xml.etree import ElementTree

import pytest

import holdfast
from holdfast import cli
from holdfast.audit.verdicts import CHECKS
from holdfast.extras import EXTRAS
from repository import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
LOOP, SHELL = re.search(r"```python\n(.*?run\.batches.*?)```\n\n```\n(.*?)```", README, flags=re.S).groups()  # type: ignore[union-attr]
COMMANDS = SHELL.splitlines()
RUNNING = (ROOT / "docs/running.md").read_text()
LOOKS = re.findall(r"^holdfast (?:watch|report) .*", RUNNING, flags=re.M)
(ADVISE,) = re.findall(r"^holdfast advise .*", RUNNING, flags=re.M)
SVG = "http://www.w3.org/2000/svg"
WITHIN = 300.0

# Put into a process before anything else: it finds no package of these names, as if they were not installed.
WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Without:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in {missing!r} else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""


def packages(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}  # type: ignore[index]


def test_the_core_depends_on_seven_packages() -> None:
    core = {"fsspec", "numpy", "rich", "threadpoolctl", "torch", "typer", "xxhash"}
    assert packages(PROJECT["dependencies"]) == core


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_installs_the_modules_that_it_enables(extra: str) -> None:
    home = packages_distributions()
    brought = {name.lower() for module in EXTRAS[extra] for name in home[module]}
    assert brought == packages(PROJECT["optional-dependencies"][extra])


def test_the_dev_extra_includes_everything_that_tests_need() -> None:
    assert any(re.match(r"holdfast\[.*\blab\b", name) for name in PROJECT["optional-dependencies"]["dev"])


def test_dir_shows_names_before_they_are_imported() -> None:
    code = "import sys, holdfast as hf; print(*dir(hf)); sys.exit(bool({'torch', 'numpy'} & {*sys.modules}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WITHIN)
    assert ran.returncode == 0, "importing holdfast alone imports torch or numpy"
    assert {"attach", "Run", "Batch", *holdfast.__all__} <= set(ran.stdout.split())


def test_help_does_not_import_what_only_commands_need() -> None:
    heavy = {"torch", "numpy", "matplotlib", "sklearn", "numba", "ray", "jinja2", "fsspec"}
    code = f"import atexit, sys; from holdfast.cli import main; atexit.register(lambda: print({heavy!r} & {{*sys.modules}}, file=sys.stderr)); main()"
    ran = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, timeout=WITHIN)
    assert (ran.returncode, ran.stderr) == (0, "set()\n")
    assert "audit" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["lab", "list"], "`holdfast lab` needs"),
        (["lab", "run", "qp-bound"], "`holdfast lab` needs"),
        (["cost", "nowhere", "--figure", "cost.png"], "--figure needs"),
        (["report", "nowhere"], "`holdfast report` needs"),
        (["watch", "nowhere", "--web"], "`holdfast watch --web` needs"),
        (["serve", "train", "--workload", "lda-generated", "--out", "run"], "a workload such as lda-generated needs"),
        (["serve", "train", "--workload", "mlr-digits", "--out", "run"], "the data set digits needs"),
    ],
)
def test_a_command_that_needs_the_lab_says_so_before_it_does_anything(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("holdfast.extras.find_spec", lambda module: None)
    monkeypatch.setattr(sys, "argv", ["holdfast", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    message = capsys.readouterr().err
    assert ended.value.code == 2
    assert says in message
    assert "pip install 'holdfast[lab]'" in message
    assert message.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has the wheel, the core's packages, and none of the extras'."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*pip, "--wheel-dir", folder, source], capture_output=True, text=True, timeout=WITHIN)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("holdfast-*.whl")
    site = folder / "site"
    zipfile.ZipFile(wheel).extractall(site)
    missing = {*(module for modules in EXTRAS.values() for module in modules), "ray", "s3fs", "scipy", "safetensors"}
    (site / "sitecustomize.py").write_text(WITHOUT.format(missing=missing))
    return {**os.environ, "PYTHONPATH": str(site)}


class Installed:
    """A folder in which commands are given that have the wheel, and what they printed."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self.environment, self.folder = environment, folder

    def __call__(self, command: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-P", "-m", *shlex.split(command, comments=True)]
        return subprocess.run(
            words, capture_output=True, text=True, timeout=WITHIN, env=self.environment, cwd=self.folder, check=False
        )


@pytest.fixture(scope="module")
def trained(installed: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The README's loop, trained by its own command with the wheel, and killed before step 6."""
    holdfast = Installed(installed, tmp_path_factory.mktemp("readme"))
    where = "import holdfast; print('trained with', holdfast.__file__)\n"
    (holdfast.folder / "train.py").write_text(where + LOOP)
    run = COMMANDS[0].replace("holdfast run", "holdfast run --inject kill@6,rank=1")
    ran = holdfast(run)
    assert ran.returncode == 0, ran.stderr
    assert "completed after 2 attempts" in ran.stdout
    assert f"trained with {installed['PYTHONPATH']}" in ran.stderr + ran.stdout
    return holdfast


def test_the_wheel_trains_the_readme_loop_through_a_kill_and_runs_its_commands(trained: Installed) -> None:
    _, audit, cost = COMMANDS
    assert trained(audit).stdout.endswith("audit: pass\n")
    assert "restarts: 1" in trained(cost).stdout
    assert trained(ADVISE).stdout.startswith("advice: --recovery ")


def test_without_the_lab_extra_its_commands_are_refused_in_one_line(trained: Installed) -> None:
    ran = trained("holdfast lab list")
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1), ran.stderr
    assert "needs packages that are not installed" in ran.stderr


def test_the_core_alone_can_watch_a_finished_run(trained: Installed) -> None:
    watch, _ = LOOKS
    ran = trained(watch)
    assert ran.returncode == 0, ran.stderr
    assert "step 12 of 12" in ran.stdout
    assert "was killed by SIGKILL" in ran.stdout
    assert "holdfast_step{" in trained(f"{watch.partition('#')[0]} --prometheus").stdout


def test_with_the_lab_extra_the_documented_report_is_written(trained: Installed) -> None:
    _, report = LOOKS
    whole = Installed({**os.environ, "PYTHONPATH": str(ROOT / "src")}, trained.folder)
    ran = whole(report)
    assert (ran.returncode, ran.stdout) == (0, "report: report.html\n"), ran.stderr
    page = (trained.folder / "report.html").read_text()
    checks = len(CHECKS)  # without that of corruption (--witness-every), and with that of the snapshots
    assert f"{checks} of {checks} checks of the audit pass" in page
    assert "1 failure (SIGKILL of rank 1 after" in page


def test_the_picture_of_a_run_shows_ranks_snapshots_and_failures(trained: Installed) -> None:
    draw = runpy.run_path(str(ROOT / "docs/picture/draw.py"))
    picture = draw["drawn_run"](holdfast.read_history(trained.folder / "runs/a").events)
    assert (picture.ranks, picture.steps) == (4, 12)
    assert [(rank, what) for _, rank, what in picture.failures] == [(1, "SIGKILL")]
    assert [step for _, step in picture.saves] == [0, 12]
    assert {stretch.colour for stretch in picture.stretches} == {draw["STARTING"], draw["TRAINED"], draw["AGAIN"]}
    svg = ElementTree.fromstring(draw["svg"](picture))
    assert {"rank 0", "rank 3", "rank 1: SIGKILL"} <= {text.text for text in svg.iter(f"{{{SVG}}}text")}
