"""Text for a terminal: tables, wrapped lines, figures with units."""

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP = "  "
UNKNOWN = "-"
Row = TypeVar("Row")
_UNBOUNDED = 10_000  # terminal width in columns at which no table is cut
_UNIT = re.compile(r"(?<=\d) (?=(?:ms|s|%)(?!\w))")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """Column of a table. Columns of a higher `rank` are shown only if all columns of that rank fit."""

    header: str
    cell: Callable[[Row], str]
    rank: int = 0
    is_number: bool = True


def fitting_table(columns: Sequence[Column[Row]], rows: Sequence[Row], width: int) -> list[str] | None:
    """Return a header and a line per row, with as many columns as fit; None if those of rank 0 do not fit."""
    for rank in range(max(column.rank for column in columns), -1, -1):
        lines = table([column for column in columns if column.rank <= rank], rows)
        if all(len(line) <= width for line in lines):
            return lines
    return None


def table(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> list[str]:
    """Return a header and a line per row, as wide as their content."""
    drawn = Table(box=None, pad_edge=False, padding=(0, len(GAP), 0, 0), header_style="")
    for column in columns:
        drawn.add_column(column.header, justify="right" if column.is_number else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*(Text(column.cell(row)) for column in columns))
    console = Console(width=_UNBOUNDED, color_system=None)
    with console.capture() as captured:
        console.print(drawn)
    return [line.rstrip() for line in captured.get().splitlines()]


def wrapped(texts: Sequence[str], width: int, indent: str = GAP, break_ids: bool = False) -> Iterator[str]:
    """Wrap texts. Leading blanks stay, and a number is never separated from its unit."""
    for text in texts:
        bound = _UNIT.sub("\N{NO-BREAK SPACE}", text)
        for line in textwrap.wrap(
            bound, width, subsequent_indent=indent, break_long_words=break_ids, break_on_hyphens=False
        ):
            yield line.replace("\N{NO-BREAK SPACE}", " ")


def ms(value: float) -> str:
    """Format milliseconds; up to a day, the text has at most 9 characters."""
    if value >= 9_999.5:
        return f"{value / 1e3:,.1f} s"
    return f"{value:,.0f} ms" if value >= 9.95 else f"{value:.1f} ms"


def seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 9.95 else f"{value:.1f} s"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def count(number: int, noun: str) -> str:
    """Format a number with its noun: `1 block`, `1,024 blocks`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
