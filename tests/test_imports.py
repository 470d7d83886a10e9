"""Packages import each other in one direction only, along the arrows of one table."""

from pathlib import Path

import pytest

from source_tree import imported, modules

# Which package or top-level module may import which: each row only names rows above it, so there is no cycle.
# A subpackage that is a layer of its own has its own row. `holdfast` is the public facade: it imports lazily, so it may
# import everything. Only scripts that stand for a user's (in demo and lab) import it, and the CLI, for the version.
MAY_IMPORT: dict[str, list[str]] = {
    "errors": [],
    "process": [],
    "printable": [],
    "processor_wait": [],
    "stall": ["errors"],
    "memory": ["errors"],
    "progress": ["errors"],
    "atomic_write": [],
    "libraries": [],
    "code_digest": ["libraries"],
    "own_file": ["code_digest", "errors"],
    "extras": ["errors", "libraries", "own_file"],
    "blocks": ["errors", "own_file"],
    "theory": ["blocks", "errors"],
    "sampler": ["blocks", "errors"],
    "events": ["errors", "sampler", "stall"],
    "finding": ["events"],
    "checkpoint": ["blocks", "errors", "memory", "stall"],
    "faults": ["blocks", "checkpoint", "errors"],
    "history": ["atomic_write", "checkpoint", "errors", "events", "sampler"],
    "distributed": ["errors", "progress"],
    "cost": ["blocks", "errors", "events", "faults", "history", "stall"],
    "runs": ["checkpoint", "cost", "distributed", "errors", "events", "faults", "history", "memory"],
    "train.state": [
        "blocks",
        "checkpoint",
        "distributed",
        "errors",
        "events",
        "history",
        "process",
        "progress",
        "runs",
        "sampler",
        "stall",
    ],
    "train.data": ["blocks", "errors", "process", "sampler", "train.state"],
    "train.observe": ["blocks", "distributed", "errors", "libraries", "sampler", "train.state"],
    "weights": ["checkpoint", "errors", "history", "memory", "runs", "train.state"],
    "compare": ["checkpoint", "errors", "finding", "train.state", "weights"],
    "live": [
        "checkpoint",
        "distributed",
        "errors",
        "events",
        "processor_wait",
        "progress",
        "runs",
        "sampler",
        "train.state",
    ],
    "train": [
        "blocks",
        "checkpoint",
        "distributed",
        "errors",
        "events",
        "faults",
        "history",
        "live",
        "process",
        "processor_wait",
        "progress",
        "runs",
        "sampler",
        "train.data",
        "train.observe",
        "train.state",
        "weights",
    ],
    "trainers": ["distributed", "errors", "progress", "train", "train.data"],
    "supervise": [
        "atomic_write",
        "checkpoint",
        "cost",
        "distributed",
        "errors",
        "events",
        "finding",
        "history",
        "memory",
        "process",
        "progress",
        "runs",
        "train",
        "weights",
    ],
    "rehearse": [
        "compare",
        "errors",
        "events",
        "faults",
        "finding",
        "history",
        "progress",
        "runs",
        "supervise",
        "train.observe",
        "train.state",
    ],
    "advice": ["blocks", "cost", "errors", "events"],
    "server.audit": ["blocks", "errors", "events", "finding", "history", "sampler"],
    "audit": ["checkpoint", "errors", "events", "finding", "history", "memory", "runs", "sampler", "server.audit"],
    "report": [
        "atomic_write",
        "audit",
        "cost",
        "errors",
        "events",
        "finding",
        "history",
        "memory",
        "printable",
        "runs",
    ],
    "watch": ["cost", "errors", "events", "finding", "history", "printable", "report", "runs"],
    "workloads": ["atomic_write", "blocks", "checkpoint", "code_digest", "errors", "extras", "own_file"],
    "server": [
        "advice",
        "atomic_write",
        "audit",
        "blocks",
        "checkpoint",
        "errors",
        "events",
        "extras",
        "faults",
        "finding",
        "history",
        "memory",
        "report",
        "sampler",
        "theory",
        "workloads",
    ],
    "holdfast": [],
    "demo": ["audit", "cost", "faults", "history", "holdfast", "runs", "supervise"],
    "lab": [
        "advice",
        "audit",
        "blocks",
        "checkpoint",
        "code_digest",
        "cost",
        "errors",
        "events",
        "extras",
        "faults",
        "finding",
        "history",
        "holdfast",
        "live",
        "report",
        "runs",
        "sampler",
        "server",
        "supervise",
        "theory",
        "weights",
        "workloads",
    ],
    "cli": [
        "advice",
        "audit",
        "blocks",
        "checkpoint",
        "compare",
        "cost",
        "demo",
        "errors",
        "events",
        "extras",
        "faults",
        "finding",
        "history",
        "holdfast",
        "lab",
        "printable",
        "rehearse",
        "report",
        "runs",
        "server",
        "supervise",
        "watch",
        "weights",
        "workloads",
    ],
    "__main__": ["cli"],
}
MODULES = modules()


def package_of(module: str) -> str:
    """Return the row of the table that a module belongs to."""
    parts = module.split(".")[1:]
    return next((row for row in (".".join(parts[:2]), *parts[:1]) if row in MAY_IMPORT), "holdfast")


def forbidden(source: str, module: str) -> list[str]:
    """Return a line for each import in `source`, the text of `module`, that the table does not allow."""
    package = package_of(module)
    targets = sorted(imported(source))
    return [
        f"{package} may not import {package_of(target)}: {module} imports {target}"
        for target in targets
        if package != "holdfast" and package_of(target) not in (package, *MAY_IMPORT[package])
    ]


@pytest.mark.parametrize(("module", "path"), MODULES.items(), ids=MODULES)
def test_a_module_imports_only_what_the_table_allows(module: str, path: Path) -> None:
    assert forbidden(path.read_text(), module) == []


def test_the_table_has_no_cycle() -> None:
    above: set[str] = set()
    for package, targets in MAY_IMPORT.items():
        assert set(targets) <= above, f"{package} names a row below it"
        above.add(package)


def test_every_row_of_the_table_is_a_package_or_module() -> None:
    assert [row for row in MAY_IMPORT if row != "holdfast" and f"holdfast.{row}" not in MODULES] == []
    assert {package_of(module) for module in MODULES} == set(MAY_IMPORT)


@pytest.mark.parametrize(
    "source",
    [
        "from holdfast.supervise.supervisor import supervise",
        "from holdfast.supervise import supervisor",
        "import holdfast.supervise.supervisor",
        "def save():\n    from holdfast.supervise import supervisor",
    ],
)
def test_a_forbidden_import_is_reported(source: str) -> None:
    (line,) = forbidden(source, "holdfast.checkpoint.store")
    assert line == (
        "checkpoint may not import supervise: holdfast.checkpoint.store imports holdfast.supervise.supervisor"
    )


def test_an_import_within_a_package_or_along_the_table_is_not_reported() -> None:
    source = "import torch\nfrom holdfast.checkpoint import digest\nfrom holdfast.errors import BadInput"
    assert forbidden(source, "holdfast.checkpoint.store") == []
