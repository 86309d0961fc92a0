"""Tables of the commands: drawn for a person, and plain lines where the output goes elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells. Outside of a terminal each row is one line, as long as it must be, so that names can be searched.

    Args:
        console: where to.
        title: above the table.
        columns: their heads.
        rows: cells with rich's markup; what is not the table's own text is escaped.
    """
    if console.is_terminal:
        table = Table(title=title, title_justify="left")
        for column in columns[:-1]:
            table.add_column(column, no_wrap=True)
        table.add_column(columns[-1], overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    lines = [list(columns), *([Text.from_markup(cell).plain for cell in row] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        console.print("  ".join(padded).rstrip(), markup=False, highlight=False, soft_wrap=True)
