"""Tables, on the terminal and as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

import rich.box
import rich.console
import rich.table


@dataclass(frozen=True)
class Table:
    """Rows of text under columns, with notes below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def to_markdown(title: str, tables: Sequence[Table]) -> str:
    """A page with all tables, each under its own heading."""
    lines = [f"# {title}", ""]
    for table in tables:
        lines += [f"## {table.title}", ""]
        lines += [
            "| " + " | ".join(text.replace("|", r"\|") for text in row) + " |"
            for row in (table.columns, ["---"] * len(table.columns), *table.rows)
        ]
        lines += ["", *(f"- {note}" for note in table.notes), ""]
    return "\n".join(lines)


def print_tables(tables: Sequence[Table]) -> None:
    """To stdout."""
    console = rich.console.Console()
    # Where nobody looks, lines may be as long as the tables are.
    if not console.is_terminal:
        console.width = 240
    for table in tables:
        drawn = rich.table.Table(title=table.title, title_justify="left", box=rich.box.SIMPLE)
        for column in table.columns:
            drawn.add_column(column)
        for row in table.rows:
            drawn.add_row(*row)
        console.print(drawn)
