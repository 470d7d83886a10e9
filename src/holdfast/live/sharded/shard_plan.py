"""The plan by which the survivors of a sharded run complete the step in which a worker was lost. No I/O.

Until an optimizer steps, every rank has the state of the beginning of the step. So a worker that replaces a lost worker
can get its shards from the next rank, and compute the step from its beginning.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

JOINS = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReport:
    """A report on how far one rank has trained. The rank sends it to all other ranks when a recovery begins."""

    step: int  # the step that the rank trains or reaches next; JOINS for a worker that replaces a lost one
    begun: bool = False  # the rank has begun `step`
    collectives: int = 0  # those of `step` that it has completed
    optimizer_steps: int = 0  # those that it has made in `step`
    catches_up: bool = False  # it replaces a lost worker, and repeats collectives that the others have completed
    members: tuple[int, ...] = ()  # the last membership that the rank has recorded
    boundaries: int = 0  # the number by which the supervisor compares ranks

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ShardReport":
        return cls(**{**data, "members": tuple(data["members"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """The plan by which all ranks complete `step`, or begin it, after some workers were lost and replaced."""

    step: int
    begun: bool
    lost: tuple[int, ...]
    joining: tuple[int, ...]  # ranks whose worker is new: they get the shards of the lost workers
    giver: int  # the rank from which they get all state that is not sharded
    until: int  # collectives of the step that all but the needy ranks have completed
    completed: Mapping[int, int]  # by needy rank: the collectives of the step that it has completed
    repeating: tuple[int, ...]  # ranks that have completed one collective more, and repeat it with the others


def make_shard_plan(reports: Mapping[int, ShardReport], size: int) -> ShardPlan | str:
    """Return the plan of the recovery, or a string that says why the run must restart instead.

    `reports` has the report of each rank, and `size` is the number of ranks among which the model is sharded."""
    if sorted(reports) != list(range(size)):
        return f"a model that is sharded over {size} ranks cannot continue with {len(reports)}"
    joining = tuple(rank for rank, report in sorted(reports.items()) if report.step == JOINS)
    if neighbours := [(rank, (rank + 1) % size) for rank in joining if (rank + 1) % size in joining]:
        return f"ranks {neighbours[0][0]} and {neighbours[0][1]} are lost, and with them both copies of a shard"
    present = {rank: report for rank, report in sorted(reports.items()) if rank not in joining}
    complete = {rank: report for rank, report in present.items() if not report.catches_up}
    if not complete:
        return "no rank that was in the interrupted step is left"
    if len(steps := {report.step for report in present.values()}) > 1:
        return f"the survivors are in steps {min(steps)} and {max(steps)}"
    if any(report.optimizer_steps for report in present.values()):
        return "an optimizer has stepped in the interrupted step"
    counts = {report.collectives for report in complete.values()}
    until = min(counts)
    if max(counts) > until + 1:
        return f"the survivors have completed {until} and {max(counts)} collectives of the step"
    behind = {rank: report.collectives for rank, report in present.items() if report.catches_up}
    recorded = {rank for report in present.values() for rank in report.members}
    return ShardPlan(
        step=steps.pop(),
        begun=any(report.begun for report in present.values()),
        lost=tuple(sorted(recorded & {*joining})),
        joining=joining,
        giver=min(complete),
        until=until,
        completed={**behind, **dict.fromkeys(joining, 0)},
        repeating=tuple(rank for rank, report in complete.items() if report.collectives > until),
    )
