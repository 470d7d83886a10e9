"""The table of costs that `holdfast lab run --workload` prints names every policy in full."""

import io
from typing import Any

from rich.console import Console

from holdfast.cli.lab import _costs_table
from holdfast.lab.result import Result

COST = {"cost_mean": 12.345, "cost_low": 10.1, "cost_high": 14.2, "reduction": 0.31, "bound_mean": 22.3}


def printed(width: int, *policies: str) -> list[str]:
    common: dict[str, Any] = {"recovery": "partial", "saves": "regular", "fraction": "1/8", "lost": "1/2", **COST}
    rows = [{**common, "policy": policy} for policy in policies]
    result = Result(experiment="mine", config={}, rows=rows, claims=[])
    output = io.StringIO()
    Console(width=width, file=output).print(_costs_table(result))
    return output.getvalue().splitlines()


def test_the_name_of_a_policy_file_is_not_cut_in_a_terminal_of_80_columns() -> None:
    lines = printed(80, "priority", "oldest_moved.py")
    assert any("oldest_moved.py" in line for line in lines)


def test_a_long_name_continues_on_the_next_line() -> None:
    name = "blocks_that_moved_more_than_a_hundredth_of_their_norm.py"
    column = "".join(line[10:28].strip() for line in printed(80, name))
    assert name in column
