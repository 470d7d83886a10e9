"""The costs of strategies as a table for a reader, and what is to be said of trials that did not converge."""

from collections.abc import Sequence
from math import isnan

from holdfast.lab.partial.comparison import Compared
from holdfast.lab.partial.measure import LIMIT
from holdfast.lab.result import ResultTable, Row
from holdfast.lab.simulate.strategy import Strategy

COLUMNS = {  # of the table: from a row of a result
    "workload": "panel",
    "recovery": "recovery",
    "policy": "policy",
    "saved at once": "fraction",
    "lost": "lost",
    "trials": "trials",
    "not converged": "unconverged",
    "cost": "cost_mean",
    "from": "cost_low",
    "to": "cost_high",
    "whole iterations": "whole_mean",
    "reduction": "reduction",
    "reduction from": "reduction_low",
    "reduction to": "reduction_high",
    "bound": "bound_mean",
}


def cost_table(panels: Sequence[Compared]) -> ResultTable:
    """A row for each strategy on each panel: its mean cost in iterations with its 95 % interval, and its reduction."""
    rows = [[_shown(row[key]) for key in COLUMNS.values()] for compared in panels for row in compared.rows]
    return ResultTable("Iteration costs, with 95 % confidence intervals", list(COLUMNS), rows)


def unconverged(panels: Sequence[Compared]) -> list[str]:
    """A line for each strategy some of whose trials did not reach the criterion."""
    return [_unconverged(compared, row) for compared in panels for row in compared.rows if row["unconverged"]]


def named(strategy: Strategy) -> str:
    """A strategy for a reader."""
    policy = strategy.policy
    saves = "full checkpoints" if policy.fraction == 1 else f"{policy.ranking} checkpoints of {policy.fraction}"
    return f"{saves}, {strategy.recovery} recovery, {strategy.lost} lost"


def _unconverged(compared: Compared, row: Row) -> str:
    others = "no mean or reduction is given" if isnan(row["cost_mean"]) else "means and reductions are of the others"
    return (
        f"{compared.label}, {row['policy']} {row['fraction']}, {row['recovery']} recovery, {row['lost']} lost: "
        f"{row['unconverged']} of {row['trials']} trials did not reach the criterion within {LIMIT} times the iterations of an "
        f"unperturbed run; {others}."
    )


def _shown(value: str | float | int) -> str | float | int | None:
    """A value with the digits that a reader needs; none where there is no number."""
    if isinstance(value, float):
        return None if isnan(value) else round(value, 4)
    return value
