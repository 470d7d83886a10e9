"""The plan by which the survivors of a sharded run complete the step in which a worker was lost. No I/O.

Until an optimizer steps, every rank has the state of the beginning of the step. So a worker that replaces a lost worker
can get its shards from a rank with a copy of them, and compute the step from its beginning.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

JOINS = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReport:
    """A report on how far one rank has trained. The rank sends it to all other ranks when a recovery begins."""

    step: int  # the step that the rank trains or reaches next; JOINS for a worker that replaces a lost one
    apart: int = 1  # see Ring: how far from a rank the rank with a copy of its shards is
    begun: bool = False  # the rank has begun `step`
    collectives: int = 0  # those of `step` that it has completed
    optimizer_steps: int = 0  # those that it has made in `step`
    exchanges: bool = False  # it is in the exchange that precedes an optimizer step, or in the one of averages
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
    holders: Mapping[int, int]  # by joining rank: the rank from which it gets its shards
    completed: Mapping[int, int]  # by rank: the collectives of the step that it has completed
    late: tuple[int, ...]  # ranks that first finish the step before, in which they need no other rank any more


def make_shard_plan(reports: Mapping[int, ShardReport], copies: Mapping[int, Sequence[int]]) -> ShardPlan | str:
    """Return the plan of the recovery, or a string that says why the run must restart instead.

    `reports` has the report of each rank. `copies` has, for each rank of the run, the ranks with a copy of its shards."""
    size = len(copies)
    if sorted(reports) != list(range(size)):
        return f"a model that is sharded over {size} ranks cannot continue with {len(reports)}"
    if len({report.apart for report in reports.values()}) > 1:
        return "a worker has started with another number of nodes, and would look for copies of shards on other ranks"
    joining = tuple(rank for rank, report in sorted(reports.items()) if report.step == JOINS)
    present = {rank: report for rank, report in sorted(reports.items()) if rank not in joining}
    if not present:
        return "no rank that was in the interrupted step is left"
    step = max(report.step for report in present.values())
    # No rank completes an exchange before all ranks have begun it, and with the next step a rank has completed all.
    late = tuple(rank for rank, report in present.items() if report.step == step - 1 and report.exchanges)
    ahead = [rank for rank in present if rank not in late]
    holders = {}
    for rank in joining:
        left = [other for other in (*ahead, *late) if other in copies[rank]]
        if not left:
            return f"{_names(rank, *copies[rank])} are lost, and with them all copies of a shard"
        holders[rank] = left[0]
    if other := {present[rank].step for rank in ahead} - {step}:
        return f"the survivors are in steps {min(other)} and {step}"
    if any(present[rank].optimizer_steps for rank in ahead):
        return "an optimizer has stepped in the interrupted step"
    recorded = {rank for report in present.values() for rank in report.members}
    return ShardPlan(
        step=step,
        begun=any(present[rank].begun for rank in ahead),
        lost=tuple(sorted(recorded & {*joining})),
        joining=joining,
        giver=ahead[0],
        holders=holders,
        completed={rank: 0 if rank in late else report.collectives for rank, report in reports.items()},
        late=late,
    )


def _names(*ranks: int) -> str:
    *others, last = sorted(ranks)
    return f"ranks {', '.join(map(str, others))} and {last}"
