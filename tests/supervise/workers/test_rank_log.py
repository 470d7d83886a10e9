"""Rank changes are shown to the user, and kept for readers of the logs."""

from pathlib import Path

import pytest

from holdfast.distributed.membership import Membership
from holdfast.runs.logs import RANKS, read_rank_changes
from holdfast.supervise.workers.rank_log import RankLog

LOGS = "logs/attempt-0002"


def rank_log(out: Path) -> RankLog:
    (out / LOGS).mkdir(parents=True)
    return RankLog(out, 2)


def test_a_replacement_is_named_with_its_file_and_all_train_again_once_they_do(tmp_path: Path) -> None:
    here = rank_log(tmp_path)
    here.follow(Membership(1, (0, 1, 2), {1: 3}), {0: "rank-0", 1: "worker-3", 2: "rank-2"})
    assert here.news(all_train=0) == [f"rank 1 is now worker-3, {LOGS}/worker-3.out"]
    assert here.news(all_train=3) == ["all 3 workers train again"]
    assert here.news(all_train=3) == []
    assert read_rank_changes(tmp_path / LOGS) == [(1, "worker-3")]


def test_survivors_keep_their_ranks_and_the_loss_of_rank_0_is_named(tmp_path: Path) -> None:
    here = rank_log(tmp_path)
    for number in (1, 2):
        here.follow(Membership(number, (1, 2)), {1: "rank-1", 2: "rank-2"})
    assert here.news(all_train=0) == ["rank 0 is lost: until its replacement joins, run.is_main is true on no worker"]
    here.follow(Membership(3, (0, 1, 2), {0: 3}), {0: "worker-3", 1: "rank-1", 2: "rank-2"})
    assert here.news(all_train=0) == [f"rank 0 is now worker-3, {LOGS}/worker-3.out"]
    assert read_rank_changes(tmp_path / LOGS) == [(0, "worker-3")]


def test_a_worker_that_sleeps_and_wakes_with_its_old_rank_is_not_mentioned(tmp_path: Path) -> None:
    here = rank_log(tmp_path)
    here.follow(Membership(1, (0,), {}, (1,)), {0: "rank-0"})
    here.follow(Membership(2, (0, 1), {1: 1}), {0: "rank-0", 1: "rank-1"})
    assert here.news(all_train=2) == []
    assert read_rank_changes(tmp_path / LOGS) == []


def test_each_node_shows_changes_of_its_own_workers(tmp_path: Path) -> None:
    here = rank_log(tmp_path)
    here.follow(Membership(1, (0, 1, 2, 3), {0: 9}), {2: "rank-2", 3: "rank-3"})
    assert here.news(all_train=4) == ["all 4 workers train again"]
    here.follow(Membership(2, (0, 1, 2, 3), {0: 8}), {0: "worker-8", 2: "rank-2", 3: "rank-3"})
    assert here.news(all_train=0) == [f"rank 0 is now worker-8, {LOGS}/worker-8.out"]
    assert read_rank_changes(tmp_path / LOGS) == [(0, "worker-8")]


def test_a_full_disk_does_not_change_the_lines(tmp_path: Path) -> None:
    here = RankLog(tmp_path / "gone", 2)
    here.follow(Membership(1, (0, 1), {0: 2}), {0: "worker-2", 1: "rank-1"})
    assert here.news(all_train=0) == [f"rank 0 is now worker-2, {LOGS}/worker-2.out"]
    assert read_rank_changes(tmp_path / "gone" / LOGS) == []


@pytest.mark.parametrize("line", ["[0", "[0]", "{}", "7", '[1e400, "worker-3"]', "\x00\xff"])
def test_damaged_lines_are_passed_over(tmp_path: Path, line: str) -> None:
    (tmp_path / RANKS).write_text(f'{line}\n[0, "worker-3"]\n')
    assert read_rank_changes(tmp_path) == [(0, "worker-3")]
