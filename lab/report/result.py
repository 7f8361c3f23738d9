"""Command line, table and result file of benchmarks.

A result says what was measured where: commit, machine, date, command, verdict and all rounds. It names no host and no
folder outside the repository.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NewType, TypeVar

import torch

from baton.cli.installed import installed, output_of
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

    `flags`: default of each flag, or a pair of default and help, by name. The default also says what the flag takes: a
    type: a required value of that type; None: an optional path; False: nothing (a switch); a list: several texts.
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


Result = NewType("Result", dict[str, Any])
"""Figures with their provenance, made by `make_result`."""

ENGINE = ("engine", "kernels")
SERVICE = ("router", "worker", "decode_worker", "prefill_worker", *ENGINE)
"""Folders whose code a benchmark of a service measures."""


@dataclass(frozen=True, slots=True)
class Promise:
    """Promise that a benchmark checks. `held`, `missed`: number of rounds, or of `of`, that kept and missed it."""

    text: str
    held: int
    missed: int
    of: str = "rounds"


def judge_rounds(text: str, outcomes: Iterable[bool], of: str = "rounds") -> Promise:
    """Count the rounds that kept and missed a promise. `outcomes`: for each round, whether the promise was kept."""
    kept = list(outcomes)
    return Promise(text, sum(kept), len(kept) - sum(kept), of)


def make_result(
    measures: Sequence[str], rounds: Sequence[Mapping[str, Any]], verdict: Promise | None, **more: object
) -> Result:
    """Return a result with its provenance.

    `measures`: files and folders of the repository that contain the measured code. `rounds`: the figures of each round;
    documents show medians over them. `verdict`: None where nothing was promised. `more`: settings and summaries.
    """
    changed = output_of(["git", "-C", str(ROOT), "status", "--porcelain", "--", *measures])
    return Result(
        {
            "commit": installed(()).commit,
            "changed": None if changed is None else [line[3:] for line in changed.splitlines()],
            "machine": describe_machine(),
            "command": _command(),
            "measures": list(measures),
            "verdict": None if verdict is None else asdict(verdict),
            **more,
            "rounds": list(rounds),
        }
    )


def write_result(path: Path | None, result: Result) -> None:
    """Write a result as JSON; None writes nothing."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")


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


@dataclass(frozen=True, slots=True)
class ResultForm(Generic[Record]):
    """Columns of a benchmark's table, and the form in which its result keeps the records."""

    columns: Columns[Record]
    name: Callable[[Record], str]  # key of a record in the JSON result
    measures: Sequence[str]


def show(records: Sequence[Record], as_json: bool, shown: ResultForm[Record], note: str) -> None:
    """Print records as a JSON result of one round, or as a table with a note below it."""
    if as_json:
        print(json.dumps(make_result(shown.measures, [{shown.name(each): asdict(each) for each in records}], None)))
    else:
        print(f"{table(records, shown.columns)}\n{note}")


def describe_machine() -> dict[str, str]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),  # noqa: TID251 -- date of a result
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


def _command() -> str:
    """Return the command of this process. Paths in the repository are relative, other paths cut to the last part."""
    spec = sys.modules["__main__"].__spec__
    module = (spec.name if spec else Path(sys.argv[0]).name).removesuffix(".__main__")
    program = ["./baton"] if module == "baton.cli" else [".venv/bin/python", "-m", module]
    return shlex.join([*program, *map(_shown_argument, sys.argv[1:])])


def _shown_argument(argument: str) -> str:
    flag, sign, value = argument.rpartition("=") if argument.startswith("--") else ("", "", argument)
    path = Path(value)
    if not path.is_absolute():
        return argument
    return flag + sign + (str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name)
