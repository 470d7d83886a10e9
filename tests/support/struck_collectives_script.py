"""Trains as `fsdp_script` does; the task says before or after which collectives of which steps ranks kill themselves.

`strikes` is a list of [step, rank, number of the collective in the step, whether it has completed]. Rank 0 notes the
kinds of the collectives of every step in a file in the folder `notes`.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import fsdp_script
from holdfast.live.sharded.collectives import Collectives
from holdfast.live.sharded.operations import Operation, Team
from holdfast.live.sharded.shard_recovery import ShardedRecovery

task: dict[str, Any] = json.loads(sys.argv[1])
notes = Path(task["notes"])
step = -1
run, begin_step, end_step = Collectives.run, ShardedRecovery.begin_step, ShardedRecovery.end_step


def run_or_die(self: Collectives, operation: Operation, team: Team | None = None) -> None:
    where = [step, self.ring.rank, len(self.log)]
    die_if_struck([*where, False])
    run(self, operation, team)
    die_if_struck([*where, True])


def die_if_struck(where: list[Any]) -> None:
    if where in task["strikes"]:
        marker = notes / "-".join(map(str, where))
        if not marker.exists():  # otherwise this is the replacement
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def remember_step(self: ShardedRecovery, number: int) -> None:
    global step
    step = number
    begin_step(self, number)


def note_kinds(self: ShardedRecovery, optimizer_steps: int) -> None:
    if self.collectives.ring.rank == 0:
        kinds = [[type(operation).__name__, team.ring.size] for team, operation in self.collectives.log]
        with (notes / "kinds").open("a") as file:
            file.write(json.dumps(kinds) + "\n")
    end_step(self, optimizer_steps)


Collectives.run = run_or_die  # type: ignore[method-assign]
ShardedRecovery.begin_step = remember_step  # type: ignore[method-assign]
ShardedRecovery.end_step = note_kinds  # type: ignore[method-assign]
fsdp_script.main(task)
