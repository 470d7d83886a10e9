"""Trials on a Ray cluster give the rows that they give in one process, also of a model of one's own."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import BadInput
from holdfast.lab.experiment import Options, Progress
from holdfast.lab.partial import partial_recovery, priority_checkpoint
from holdfast.lab.simulate.pools import RayPool, Report, trial_cluster
from holdfast.workloads.registry import load_for_lab
from repository import ROOT

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_cluster")]
EXAMPLE = re.findall(r"```python\n(.*?)```", (ROOT / "docs/workloads.md").read_text(), flags=re.S)[0]


def silent(what: str, total: int) -> Progress:
    return lambda done: None


@pytest.mark.parametrize("experiment", [partial_recovery, priority_checkpoint], ids=["partial", "priority"])
def test_an_own_model_has_the_same_rows_on_ray(experiment: object, tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(EXAMPLE)
    rows = []
    for on in (None, "ray"):
        with trial_cluster(on, None) as cluster:
            workload = load_for_lab(str(tmp_path / "my_model.py"))
            options = Options(trials=4, out=tmp_path / str(on) / "out", workload=workload, cluster=cluster)
            rows.append(experiment.run(options, silent).rows)  # type: ignore[attr-defined]
    assert repr(rows[0]) == repr(rows[1])  # with few trials an interval is unknown, and nan is not equal to itself


def doubling() -> Callable[[int, Report], int]:
    """Work that travels by value: processes of the cluster cannot import this file."""

    def double(item: int, tell: Report) -> int:
        tell("doubling", item)
        if item < 0:
            raise BadInput("a negative item")
        return 2 * item

    return double


def test_reports_arrive_and_outcomes_keep_their_order() -> None:
    heard: list[tuple[str, int]] = []
    assert RayPool()(doubling(), [3, 1, 2], lambda *what: heard.append(what)) == [6, 2, 4]
    assert sorted(heard) == [("doubling", 1), ("doubling", 2), ("doubling", 3)]


def test_a_refusal_in_a_task_is_raised_here() -> None:
    with pytest.raises(BadInput, match="a negative item"):
        RayPool()(doubling(), [1, -1], lambda *what: None)
