"""The grammar of `--inject`: every form is read, and a mistake is answered with the form to write instead."""

import pytest

from holdfast.errors import BadInput
from holdfast.faults.schedule import Failure
from holdfast.faults.spec import RandomKills, parse_rehearsal, parse_server, parse_training


@pytest.mark.parametrize(
    ("spec", "failures"),
    [
        ("kill@120", (Failure(step=120, kind="kill", targets=(0,)),)),
        (
            "kill@120:backward=0.5,rank=3+1+3",
            (Failure(step=120, kind="kill", point="backward=0.5", targets=(1, 3)),),
        ),
        ("hang@40,rank=2", (Failure(step=40, kind="hang", targets=(2,)),)),
        ("flip@90:moment=30,rank=1", (Failure(step=90, kind="flip", point="moment=30", targets=(1,)),)),
        ("enospc@200:manifest", (Failure(step=200, kind="enospc", point="manifest", targets=(0,)),)),
        ("exit@90+7", (Failure(step=7, kind="exit", targets=(0,)), Failure(step=90, kind="exit", targets=(0,)))),
    ],
)
def test_failures_of_a_run_are_parsed(spec: str, failures: tuple[Failure, ...]) -> None:
    assert parse_training([spec]) == failures


def test_failures_of_several_options_are_ordered_by_step() -> None:
    assert [failure.step for failure in parse_training(["kill@30", "hang@10", "slow@20+5"])] == [5, 10, 20, 30]
    assert parse_training([]) == ()


@pytest.mark.parametrize(
    ("spec", "failure"),
    [
        ("kill@7", Failure(step=7, kind="node", targets=(0,))),
        ("kill@7,node=1+2", Failure(step=7, kind="node", targets=(1, 2))),
        ("kill@7:checkpoint,worker=0", Failure(step=7, kind="worker", point="checkpoint", targets=(0,))),
        ("kill@5,controller", Failure(step=5, kind="controller", targets=(0,))),
    ],
)
def test_failures_of_a_parameter_server_are_parsed(spec: str, failure: Failure) -> None:
    assert parse_server([spec]) == (failure,)


def test_random_kills_of_a_rehearsal_are_parsed() -> None:
    assert parse_rehearsal("random=3,seed=7") == RandomKills(count=3, seed=7)
    assert parse_rehearsal("random=0") == RandomKills(count=0, seed=None)


@pytest.mark.parametrize(
    "spec", ["", "kill", "kill@", "kill@-1", "kill@3,", "kill@3:,rank=1", "@3", "kill@3,rank=1,rank=2"]
)
def test_a_malformed_specification_is_refused_with_an_example(spec: str) -> None:
    with pytest.raises(BadInput, match=r"is not understood.*Write kill@120"):
        parse_training([spec])
    with pytest.raises(BadInput, match=r"is not understood.*Write kill@7"):
        parse_server([spec])


@pytest.mark.parametrize("spec", ["kill@3,node=1", "kill@3,controller", "kill@3,rank"])
def test_a_run_has_only_ranks(spec: str) -> None:
    with pytest.raises(BadInput, match=r"does not name ranks.*Write kill@3,rank=1\+3\."):
        parse_training([spec])


@pytest.mark.parametrize("spec", ["kill@3,rank=1", "kill@3,node", "kill@3,controller=1"])
def test_a_parameter_server_has_nodes_workers_and_one_controller(spec: str) -> None:
    with pytest.raises(BadInput, match=r"does not say which process is killed.*kill@3,controller\."):
        parse_server([spec])


def test_processes_of_a_parameter_server_can_only_be_killed() -> None:
    with pytest.raises(BadInput, match=r"asks for 'hang'.*Write kill@3\."):
        parse_server(["hang@3"])


@pytest.mark.parametrize("spec", ["kill@3", "random", "random=3,seed=x", "random=-1"])
def test_a_rehearsal_takes_only_random_kills(spec: str) -> None:
    with pytest.raises(BadInput, match=r"Write random=3 or random=3,seed=7\."):
        parse_rehearsal(spec)
