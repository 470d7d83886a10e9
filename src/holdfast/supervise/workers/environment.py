"""What a worker is told by environment variables: as torchrun would tell it, and what holdfast adds."""

import os
from pathlib import Path

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup

from holdfast.distributed.ranks import NODE, TERM
from holdfast.supervise.nodes.node import interface
from holdfast.supervise.nodes.rendezvous import RoundInfo


def as_torchrun(member: Worker, group: WorkerGroup) -> dict[str, str]:
    """The variables that torchrun sets: who the worker is, and where its store is."""
    variables = {
        "RANK": member.global_rank,
        "LOCAL_RANK": member.local_rank,
        "WORLD_SIZE": member.world_size,
        "LOCAL_WORLD_SIZE": group.spec.local_world_size,
        "GROUP_RANK": group.group_rank,
        "GROUP_WORLD_SIZE": group.group_world_size,
        "ROLE_RANK": member.role_rank,
        "ROLE_WORLD_SIZE": member.role_world_size,
        "ROLE_NAME": group.spec.role,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
        "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_MAX_RESTARTS": group.spec.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the supervisor keeps the store, no worker has to
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    return {name: str(value) for name, value in variables.items()}


def of_holdfast(out: Path, meeting: RoundInfo, error: Path) -> dict[str, str]:
    """What differs from attempt to attempt, and where the run lies."""
    variables = {
        "HOLDFAST_OUT": str(out),
        "HOLDFAST_ROUND": meeting.round,
        "HOLDFAST_ATTEMPT": str(meeting.attempt),
        "TORCHELASTIC_RESTART_COUNT": str(meeting.attempt - 1),
        "TORCHELASTIC_ERROR_FILE": str(error),
    }
    if meeting.term:
        variables |= {TERM: str(meeting.term), NODE: str(meeting.node)}
    # Gloo would listen where the machine's name points to: on every network, or where other nodes cannot reach it.
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface(meeting.address)):
        variables["GLOO_SOCKET_IFNAME"] = name
    return variables
