"""Whether and how a rank recovers live: as its run wants, if what its ranks talk over allows it."""

import logging
import os

from holdfast import progress
from holdfast.distributed import nccl_link as device_link
from holdfast.distributed import ranks as world
from holdfast.distributed.ranks import World
from holdfast.errors import BadInput
from holdfast.live.coordination import Meeting
from holdfast.live.recovery import Live
from holdfast.runs.config import RunConfig

logger = logging.getLogger(__name__)


def live_for(config: RunConfig, peers: World) -> Live | None:
    """How this rank recovers live, if the run does."""
    if config.recovery == "restart" or not peers.grouped or peers.connect is None:
        return None
    joins = world.JOINS in os.environ
    if why := device_link.why_not(peers.backend):
        _say_not_live(config, why, joins=joins)
        return None
    members = () if joins else tuple(range(peers.size))
    meeting = Meeting(peers.rank, members, peers.connect, seat=peers.rank, joins=joins)
    live = Live(config.recovery, peers.size, meeting, link=device_link.link_for(peers.backend, peers.device))
    live.join()
    peers.has_changed = lambda: meeting.is_outdated
    peers.lost = meeting.lost
    return live


def _say_not_live(config: RunConfig, why: str, *, joins: bool) -> None:
    """Say, to the supervisor too, that a failure is survived by a restart."""
    progress.here.falls_back()
    line = f"--recovery {config.recovery} is not possible here ({why})"
    if joins:
        raise BadInput(f"{line}, and spares have nothing to do: leave them out.")
    if not int(os.environ.get("RANK", "0")):
        logger.warning("%s: after a failure the run starts again from its newest snapshot, as with restart.", line)
