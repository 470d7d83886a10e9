"""A checkpoint policy from the user's own file ranks blocks in the simulator and on the parameter server alike."""

import csv
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import holdfast as hf
from holdfast.blocks.own_policy import defines_policy, own_ranking, own_rankings, urgency
from holdfast.blocks.policy import BlockInfo, Policy
from holdfast.cli import app
from holdfast.errors import BadInput
from holdfast.server.selection import Candidates, exchange
from repository import ROOT

OLDEST = "def urgency(info, step):\n    return info.distances * (step - info.saved_at)\n"
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/workloads.md").read_text(), flags=re.S)
PAGERANK = str(ROOT / "examples" / "pagerank.py")


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    (tmp_path / "oldest.py").write_text(OLDEST)
    return tmp_path / "oldest.py"


def info_of(blocks: int) -> BlockInfo:
    rng = np.random.default_rng(3)
    distances, norms = rng.random(blocks).round(1), rng.random(blocks)
    return BlockInfo(distances, norms, rng.integers(0, 4, blocks), rng.integers(1, 5, blocks))


def test_nodes_that_each_see_some_blocks_choose_the_same_as_the_simulator(policy_file: Path) -> None:
    policy = Policy(ranking=own_ranking(str(policy_file)), interval=8, fraction=Fraction(1, 4))
    info, nodes = info_of(40), np.array_split(np.random.default_rng(0).permutation(40), 3)
    parts = [np.sort(ids) for ids in nodes]
    own = [
        Candidates(
            policy, 6, ids, BlockInfo(*(a[ids] for a in (info.distances, info.norms, info.saved_at, info.sizes))), 40
        )
        for ids in parts
    ]

    def ask(*question: Any) -> Sequence[Any]:
        return [candidates.answer(*question) for candidates in own]

    selection = exchange(policy, Fraction(0), ask)
    chosen = np.sort(np.concatenate([candidates.taken(selection.verdict) for candidates in own]))
    expected = policy.choose(6, info)
    assert chosen.tolist() == expected.ids.tolist()
    assert selection.credit == expected.credit


@pytest.mark.slow
def test_compare_measures_a_policy_of_ones_own(policy_file: Path, tmp_path: Path) -> None:
    comparison = hf.lab.compare(PAGERANK, trials=5, policies=[policy_file], out=tmp_path / "out")
    assert [row.policy for row in comparison][-1] == "oldest.py"


@pytest.mark.slow
def test_the_lab_measures_a_policy_of_ones_own(policy_file: Path, tmp_path: Path) -> None:
    words = [
        "--workload",
        PAGERANK,
        "--policy",
        str(policy_file),
        "--trials",
        "3",
        "--jobs",
        "2",
        "--out",
        str(tmp_path),
    ]
    ended = CliRunner().invoke(app, ["lab", "run", "priority-checkpoint", *words])
    assert ended.exit_code == 0, ended.output
    trials = list(csv.DictReader((tmp_path / "trials.csv").read_text().splitlines()))
    assert "oldest.py" in {trial["policy"] for trial in trials}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "has no function urgency"),
        ("def urgency(info, step):\n    return info.distances / info.distances.sum()\n", "if other blocks are absent"),
        ("def urgency(info, step):\n    return 1\n", "not one number for each block"),
        ("def urgency(info, step):\n    return 1 / 0\n", "failed: ZeroDivisionError"),
        (
            "def urgency(info, step):\n    return info.distances * float('nan')\n",
            "returns NaN for a block with distance",
        ),
        (
            "def urgency(info, step):\n    return info.distances / info.distances\n",
            "NaN for a block with distance 0 and norm .* at step 5: .* Does it divide 0 by 0",
        ),
        (
            "def urgency(info, step):\n    info.distances[:] = 0\n    return info.norms\n",
            "failed: ValueError: .* read-only",
        ),
    ],
)
def test_a_policy_file_that_cannot_rank_blocks_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "wrong.py").write_text(text)
    with pytest.raises(BadInput, match=message):
        own_ranking(str(tmp_path / "wrong.py"))


def test_the_test_of_a_policy_in_the_documentation_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (policy,) = (block for block in BLOCKS if block.startswith('"""my_policy.py'))
    (test,) = (block for block in BLOCKS if block.startswith('"""test_my_policy.py'))
    (tmp_path / "my_policy.py").write_text(policy)
    names: dict[str, Any] = {}
    exec(test, names)
    names["test_block_a_is_saved_first"]()
    (tmp_path / "my_policy.py").write_text(policy.replace("return", "return -"))
    own_ranking("my_policy.py")  # loads the file again
    with pytest.raises(AssertionError):
        names["test_block_a_is_saved_first"]()


def test_nan_is_refused_at_any_step_but_not_for_a_block_of_a_model_that_diverged(tmp_path: Path) -> None:
    path = tmp_path / "by_norm.py"
    path.write_text("def urgency(info, step):\n    return info.distances / info.norms\n")
    diverged = BlockInfo(np.array([1.0, np.nan]), np.array([1.0, np.inf]), np.zeros(2, int), np.ones(2, int))
    assert np.isnan(urgency(own_ranking(str(path)), diverged, 3)).tolist() == [False, True]
    empty = BlockInfo(np.array([1.0, 0.0]), np.array([1.0, 0.0]), np.zeros(2, int), np.ones(2, int))
    with pytest.raises(BadInput, match="NaN for a block with distance 0 and norm 0"):
        urgency(str(path), empty, 3)


def test_nan_that_depends_on_the_step_alone_is_not_blamed_on_a_division(tmp_path: Path) -> None:
    path = tmp_path / "late.py"
    path.write_text("def urgency(info, step):\n    return info.distances + (float('nan') if step > 20 else 0)\n")
    ranking, info = own_ranking(str(path)), info_of(3)
    with pytest.raises(BadInput, match=r"and norm [0-9.]+ at step 21: return a number for every block\.$"):
        urgency(ranking, info, 21)


def test_a_list_with_a_number_for_each_block_is_as_good_as_an_array(tmp_path: Path) -> None:
    path = tmp_path / "listed.py"
    path.write_text("def urgency(info, step):\n    return [distance * step for distance in info.distances]\n")
    info = info_of(3)
    assert urgency(own_ranking(str(path)), info, 2).tolist() == (2 * info.distances).tolist()


def test_equal_numbers_are_saved_in_the_order_of_the_last_save_and_of_the_blocks(tmp_path: Path) -> None:
    path = tmp_path / "equal.py"
    path.write_text("def urgency(info, step):\n    return 0 * info.distances\n")
    policy = Policy(ranking=str(path), interval=8, fraction=Fraction(1, 2))
    info = BlockInfo(np.ones(4), np.ones(4), np.array([3, 2, 1, 2]), np.ones(4, int))
    assert policy.choose(4, info).ids.tolist() == [1, 2]


def test_a_built_in_workload_and_a_file_with_a_model_are_no_policies(policy_file: Path) -> None:
    assert [defines_policy(name) for name in ("mlr-digits", PAGERANK, str(policy_file))] == [False, False, True]


def test_two_policy_files_of_the_same_name_are_refused(tmp_path: Path) -> None:
    paths = [str(tmp_path / folder / "p.py") for folder in ("a", "b")]
    for path in map(Path, paths):
        path.parent.mkdir()
        path.write_text(OLDEST)
    with pytest.raises(BadInput, match=r"Two policies are called p\.py: .*a/p\.py and .*b/p\.py"):
        own_rankings(paths)
    assert own_rankings(paths[:1]) == tuple(paths[:1])


def test_a_history_with_a_policy_of_the_users_own_is_audited_without_running_its_code() -> None:
    policy = Policy(ranking="a-file-that-does-not-exist.py", interval=4, fraction=Fraction(1, 4))
    assert policy.due(1)
    assert policy.name == "a-file-that-does-not-exist.py"
