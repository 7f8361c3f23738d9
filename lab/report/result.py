"""Command line, table and result file of benchmarks.

A result file begins with date, machine and versions, and names no host or path.
"""

import argparse
import datetime
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from baton.launch.paths import ROOT

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Row = TypeVar("Row")
Record = TypeVar("Record", bound="DataclassInstance")
Columns = Mapping[str, Callable[[Row], object]]
"""Functions that return the cells of a row, by column name."""

DEMO = ROOT / "models" / "tableqa"
"""Folder of the demo model."""


def make_parser(doc: str | None, /, **flags: object) -> argparse.ArgumentParser:
    """Create a parser with the description `doc` and `--json FILE` for `write_result`.

    `flags`: by name, the default, or a pair of default and help. A type as the default makes the flag required; None:
    an optional path; False: a switch; a list: several texts.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, each in flags.items():
        default, shown = each if isinstance(each, tuple) else (each, None)
        flag: dict[str, Any] = {"default": default, "type": Path if default is None else type(default)}
        if isinstance(default, type):
            flag = {"required": True, "type": default}
        elif isinstance(default, list):
            flag = {"default": default, "nargs": "*"}
        elif default is False:
            flag = {"action": "store_true"}
        parser.add_argument(f"--{name.replace('_', '-')}", help=shown, **flag)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    return parser


def read_arguments(doc: str | None, /, **flags: object) -> argparse.Namespace:
    """Read this process's arguments with `make_parser`."""
    return make_parser(doc, **flags).parse_args()


def write_result(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Write a result as JSON; None writes nothing."""
    if path is not None:
        path.write_text(json.dumps({"machine": describe_machine(), **figures}, indent=2) + "\n")


def write_pictures(folder: Path | None, pictures: Mapping[str, str]) -> None:
    """Write SVG texts by name into a folder, which is created if needed. None: write nothing."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            (folder / f"{name}.svg").write_text(picture)


def table(rows: Sequence[Row], columns: Columns[Row]) -> str:
    """Format rows as a text table; the first column is left-aligned, the others right-aligned."""
    lines = [list(columns), *([str(cell(row)) for cell in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def show(rows: Sequence[Record], as_json: bool, columns: Columns[Record], note: str) -> None:
    """Print rows as a JSON list, or as a table with a note below it."""
    print(json.dumps([asdict(row) for row in rows]) if as_json else f"{table(rows, columns)}\n{note}")


def describe_machine() -> dict[str, str]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": _cpu_name(),
        "cores": str(len(os.sched_getaffinity(0))),
        "torch_threads": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
