"""What a script may call of torch.distributed in a sharded run that recovers live, and what is refused at once."""

import pytest
import torch

from holdfast.distributed.gloo_link import Link
from holdfast.errors import BadInput
from holdfast.live.sharded.collectives import Collectives
from holdfast.live.sharded.mesh_group import MeshGroup
from holdfast.live.sharded.operations import Ring


def lost() -> bool:
    raise AssertionError("no rank was lost")


@pytest.fixture
def group() -> MeshGroup:
    collectives = Collectives(Link(), Ring(0, 2), lost)
    return MeshGroup(collectives, collectives.world)


@pytest.mark.parametrize("name", ["send", "recv", "reduce", "scatter", "gather", "alltoall"])
def test_an_operation_that_could_not_be_repeated_after_a_loss_is_refused(group: MeshGroup, name: str) -> None:
    with pytest.raises(BadInput, match=f"torch.distributed's {name} is not supported with a sharded model"):
        getattr(group, name)([torch.zeros(1)], 1, 0)


def test_a_dtype_that_gloo_cannot_reduce_is_not_taken_for_a_lost_worker(group: MeshGroup) -> None:
    with pytest.raises(RuntimeError, match=r"gloo cannot all-reduce tensors of dtype torch\.bool"):
        group.allreduce([torch.ones(2, dtype=torch.bool)])


def test_the_group_has_a_name_by_which_a_device_mesh_finds_it(group: MeshGroup) -> None:
    group.setGroupName("all ranks")
    assert (group.getGroupName(), group.rank(), group.size()) == ("all ranks", 0, 2)
