"""One name for one thing: file names, class names, and modules large enough to be one."""

import re
from collections import defaultdict

from repository import ROOT
from source_tree import SOURCE, imported, modules

MODULES = modules()

# A file name that several packages use, and the role that it plays in each of them. Commands are exempt: cli/cost.py is
# the command that prints what cost/ computes.
SHARED_NAMES = {
    "advice": "recommends settings from measured costs: for training runs (advice), for the parameter server (server)",
    "claims": "the claims that an experiment tests",
    "compare": "compares runs: their costs (cost), their histories (rehearse)",
    "config": "a configuration that is read from a file and checked: of a run (runs), of a matrix of runs (lab)",
    "cost": "the cost of a run on the parameter server, as cost/ computes it for training runs",
    "digest": "digests: of sample ids (sampler), of stored bytes (checkpoint)",
    "figures": "the figures of a page or of an experiment",
    "members": "the current members of a group of processes",
    "metrics": "the numbers that are reported: to Prometheus (watch), by a trainer (trainers)",
    "panels": "the panels of an experiment: what each trains and how it fails",
    "process": "processes: of this program (top level), of the workers (supervise)",
    "recovery": "recovers lost members while the others continue: of a training run (live), of the server (server)",
    "registry": "finds things by the name that a user types",
    "report": "builds the report of what its package measured",
    "status": "the status of a run that is read from its files: a training run (runs), the server (server)",
    "train": "a training script that runs in worker processes",
}

# Modules under 40 lines with one importer, and why they are modules.
SMALL_MODULES = {
    "holdfast.cli.scale": "every command has a file",
    "holdfast.train.writing": "choosing the writer of a run apart from building its loop",
    "holdfast.lab.registry": "the list of experiments is where a new one is added",
}


def test_a_file_name_is_used_in_one_package_or_plays_the_same_role_in_each() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for module, path in MODULES.items():
        if path.name != "__init__.py" and not module.startswith("holdfast.cli."):
            places[path.stem].append(module)
    shared = {name: where for name, where in places.items() if len(where) > 1}
    assert {name: where for name, where in shared.items() if name not in SHARED_NAMES} == {}


def test_a_public_class_name_is_used_once() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for module, path in MODULES.items():
        for name in re.findall(r"^class ([A-Za-z]\w*)", path.read_text(), flags=re.M):
            places[name].append(module)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_a_small_module_has_several_importers_or_a_reason() -> None:
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for module, path in MODULES.items():
        for target in imported(path.read_text()):
            importers[target].add(module)
    small = {
        module
        for module, path in MODULES.items()
        if path.name != "__init__.py" and len(path.read_text().splitlines()) < 40 and len(importers[module]) == 1
    }
    assert small - SMALL_MODULES.keys() == set()


def test_folders_of_tests_mirror_packages() -> None:
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    # Supervisors with real workers; killed writers; a simulated cluster; the documents.
    others = {"integration", "crash", "simulation", "docs"}
    assert [
        str(folder) for folder in folders if not (SOURCE / "holdfast" / folder).is_dir() and str(folder) not in others
    ] == []
