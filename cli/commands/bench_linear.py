"""`baton bench linear`: its flags."""

import os
import re
from typing import Annotated, Literal

import typer

from cli import options

SHAPES = "960x576,3072x576,576x1536,49152x576,4096x1024,6144x1024,16384x2048,2048x8192"


def linear(
    shapes: Annotated[str, typer.Option(help="Outputs x inputs; several with commas.")] = SHAPES,
    rows: Annotated[str, typer.Option(help="Tokens at once; several sizes: 1,16,512.")] = "1,16,512",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; default: the cores that this process may use.")
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of inputs and outputs.")] = "float32",
    json: Annotated[bool, typer.Option("--json", help="A list of objects instead of a table.")] = False,
) -> None:
    """A projection, by every primitive of this CPU, beside the machine's limits."""
    from cli.bench.linear import LinearBenchOptions, run_linear_bench

    asked = LinearBenchOptions(
        shapes=tuple(_shape(part) for part in shapes.split(",")),
        rows=options.read_sizes(rows, "--rows"),
        threads=threads or len(os.sched_getaffinity(0)),
        dtype=dtype,
    )
    raise typer.Exit(run_linear_bench(asked, json))


def _shape(text: str) -> tuple[int, int]:
    """Raises: typer.BadParameter."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not outputs x inputs such as 960x576", param_hint="--shapes")
    return int(found[1]), int(found[2])
