"""Scripts are rehearsed for real: what is right resumes exactly, and each planted defect is named, with what to do."""

import json
from typing import Any

import pytest

from repository import EXAMPLES
from supervisor_process import SUPPORT, StartCommand

SCRIPTS = SUPPORT / "rehearsal_scripts"
WITHIN = 240.0
TASKS: dict[str, dict[str, Any]] = {
    **{
        name: {}
        for name in (
            *("grouped", "prefetched", "scheduled", "generated", "normed", "clocked", "entropic", "alone", "averaged"),
            "enumerated",
        )
    },
    "forgotten": {"script": str(SCRIPTS / "averaged.py"), "args": ["weights"]},
    "exact": {"workers": 2},
    "replayed": {"script": str(SCRIPTS / "exact.py"), "workers": 2, "recovery": "replay"},
    "counted": {"workers": 2, "recovery": "replay"},
    "sharded": {"workers": 2},
    "fsdp": {"script": str(SUPPORT / "fsdp_script.py"), "workers": 2, "args": ['{"epochs": 1}']},
    "epochs": {},
    "plain": {"script": str(SCRIPTS / "scheduled.py"), "args": ["plain"]},
    "digits": {"script": str(EXAMPLES / "digits.py"), "steps": 3, "preload": ["sklearn.datasets"]},
}


@pytest.fixture(scope="module")
def rehearsed(start_command: StartCommand, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the rehearsal of each script found."""
    tasks = {name: {"script": str(SCRIPTS / f"{name}.py"), **task} for name, task in TASKS.items()}
    driver = (SCRIPTS / "driver.py").read_text()
    ran = start_command(tmp_path_factory.mktemp("rehearsed"), json.dumps(tasks), instead=driver)
    assert ran.wait(WITHIN) == 0, ran.stderr
    return {found.pop("name"): found for found in map(json.loads, ran.stdout.splitlines())}


@pytest.mark.parametrize("name", ["exact", "replayed", "epochs", "digits", "fsdp"])
def test_a_script_that_is_right_resumes_exactly(name: str, rehearsed: dict[str, dict[str, Any]]) -> None:
    found = rehearsed[name]
    assert found["word"] is None, found["lines"]
    assert found["lines"][0].startswith("resumes exactly")


def test_kills_strike_as_printed_and_the_run_continues_from_the_saves(rehearsed: dict[str, dict[str, Any]]) -> None:
    assert rehearsed["exact"]["lines"][1:4] == [
        "  killed before step 1 (in an epoch), continued from step 1",
        "  killed before step 2 (the end of an epoch), continued from step 2",
        "  killed before step 4 (near the last step), continued from step 2",
    ]


def test_under_replay_a_replacement_continues_with_the_step_of_the_kill(rehearsed: dict[str, dict[str, Any]]) -> None:
    assert rehearsed["replayed"]["lines"][1:4] == [
        "  killed before step 1 (in an epoch), continued from step 1",
        "  killed before step 2 (the end of an epoch), continued from step 2",
        "  killed before step 4 (near the last step), continued from step 4",
    ]


def test_an_unprotected_value_that_did_not_come_back_is_noted_without_an_effect(
    rehearsed: dict[str, dict[str, Any]],
) -> None:
    assert any(line.startswith("note:") and "seen (int)" in line for line in rehearsed["exact"]["lines"])


@pytest.mark.parametrize(("name", "is_noted"), [("digits", True), ("exact", False)])
def test_a_script_for_several_ranks_that_is_rehearsed_with_one_is_noted(
    name: str, is_noted: bool, rehearsed: dict[str, dict[str, Any]]
) -> None:
    note = "note: values that differ between ranks were not tested: rehearse with --workers 2"
    assert (note in rehearsed[name]["lines"]) == is_noted


@pytest.mark.parametrize(
    ("name", "word", "says"),
    [
        ("grouped", "work after the boundary", "does not resume exactly"),
        ("prefetched", "refused", "the second batch was asked for before anything was done with the first"),
        ("scheduled", "not protected", "schedule.steps in main(), an int, is not protected"),
        ("averaged", "not protected", "centre in main(), a Tensor, is not protected: it started over after a kill"),
        ("forgotten", "refused", "ema in main() (AveragedModel) changes in training and is not protected"),
        ("counted", "not protected", "steps in main(), an int, is not protected: it started over after the kill"),
        (
            "sharded",
            "not protected",
            "momentum[0] in main(), a DTensor, is not protected: it started over after the kill",
        ),
        ("enumerated", "loop counter", "instead: write enumerate(epoch, epoch.initial)"),
        ("generated", "a generator of its own", "noise in main() is a Generator"),
        ("normed", "not protected", "model.mean, a tensor of a module that its state_dict leaves out"),
    ],
)
def test_a_planted_defect_is_named(name: str, word: str, says: str, rehearsed: dict[str, dict[str, Any]]) -> None:
    found = rehearsed[name]
    assert found["word"] == word, found["lines"]
    assert found["lines"][0].startswith("does not resume exactly")
    assert any(says in line for line in found["lines"]), found["lines"]
    assert word == "refused" or any(line.startswith("instead: ") for line in found["lines"])


def test_a_difference_is_named_by_object_and_tensor(rehearsed: dict[str, dict[str, Any]]) -> None:
    assert "  model: tensor 0.weight differs" in rehearsed["generated"]["lines"]
    rate = next(
        line for line in rehearsed["scheduled"]["lines"] if line.startswith("  optimizer: param_groups/0/lr is ")
    )
    assert rate.endswith("in the reference")


def test_a_loop_counter_is_compared_at_the_same_step_and_buffers_alone_are_noticed(
    rehearsed: dict[str, dict[str, Any]],
) -> None:
    found = "\n".join(rehearsed["enumerated"]["lines"])
    assert "at the end of step 3, i in main() is 1, and 3 in the reference" in found
    assert "only buffers differ (model/1.running_mean, model/1.running_var, model/1.num_batches_tracked)" in found


def test_a_refused_script_is_reported(rehearsed: dict[str, dict[str, Any]]) -> None:
    found = rehearsed["plain"]
    assert found["word"] == "refused"
    assert "optimizer has a learning-rate scheduler that is not protected" in found["lines"][0]


@pytest.mark.parametrize(
    ("name", "word", "says"),
    [
        ("clocked", "not deterministic", "a kernel that is not deterministic, or a clock"),
        ("entropic", "a generator of its own", "dataset.push is a Random that is seeded differently in every run"),
    ],
)
def test_runs_that_differ_without_a_kill_are_reported_as_such(
    name: str, word: str, says: str, rehearsed: dict[str, dict[str, Any]]
) -> None:
    found = rehearsed[name]
    assert found["word"] == word
    assert found["lines"][0].startswith("is not even the same without a kill: two runs differ since step 0")
    assert any(says in line for line in found["lines"]), found["lines"]


def test_a_script_that_never_attaches_has_nothing_to_compare(rehearsed: dict[str, dict[str, Any]]) -> None:
    assert "trained nothing through run.batches" in rehearsed["alone"]["error"]
