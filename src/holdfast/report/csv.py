"""A table as CSV: every row, numbers as they are."""

import csv
import io

from holdfast.report.page import Table


def text(table: Table) -> str:
    """The table with a line for its columns and one for each row."""
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow([column.name for column in table.columns])
    writer.writerows(table.rows)
    return lines.getvalue()
