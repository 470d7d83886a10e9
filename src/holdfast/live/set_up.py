"""Set-up of live recovery: decide whether this rank can recover live, and connect it to the other ranks."""

import logging
import os

from holdfast import progress
from holdfast.distributed import nccl_link
from holdfast.distributed.membership import Coordination
from holdfast.distributed.ranks import JOINS, Ranks
from holdfast.errors import BadInput
from holdfast.live.recovery import LiveRecovery
from holdfast.runs.config import RunConfig

logger = logging.getLogger(__name__)


def live_for(config: RunConfig, peers: Ranks) -> LiveRecovery | None:
    """Return the connected LiveRecovery of this rank; None if lost workers make the run restart instead."""
    if not peers.grouped or peers.connect is None:
        return None
    joins = JOINS in os.environ
    if why := nccl_link.why_not(peers.backend):
        _fall_back(f"--recovery {config.recovery} is not possible here ({why})", joins=joins, rank=peers.rank)
        return None
    members = () if joins else tuple(range(peers.size))
    rank = progress.here.assigned if joins else peers.rank
    coordination = Coordination(
        peers.rank, members, peers.connect, seat=peers.rank, is_joining=joins, rank_for_life=rank
    )
    live = LiveRecovery(config.recovery, peers.size, coordination, nccl_link.link_for(peers.backend, peers.device))
    live.connect()
    live.guard.install()
    return live


def _fall_back(why: str, *, joins: bool, rank: int) -> None:
    """Tell the supervisor that the run restarts after a failure, and let rank 0 warn the user.

    Raise BadInput in a spare worker (`joins`), which a run that restarts does not use."""
    progress.here.has_fallen_back = True
    if joins:
        raise BadInput(f"{why}, so spare workers are of no use: leave out --spares.")
    if rank == 0:
        logger.warning("%s: after a failure the run restarts from its newest snapshot.", why)
