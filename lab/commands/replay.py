"""Command `baton replay`."""

from pathlib import Path
from typing import Annotated

import typer

from baton.cli import options


def replay(
    bundle: Annotated[Path, typer.Argument(help="Archive of `baton bundle`, or a record.json.")],
    without: Annotated[
        list[str] | None, typer.Option(help="Id of a request that does not arrive; may be repeated.")
    ] = None,
    add_prefill: Annotated[int, typer.Option(min=0, max=64, help="Number of added prefill workers.")] = 0,
    add_decode: Annotated[int, typer.Option(min=0, max=64, help="Number of added decode workers.")] = 0,
    json: options.Json = False,
) -> None:
    """Replay a bundle: decide its placements and plan its steps again, and predict each TTFT, also after a change.

    Prints the first placement and the first step of each worker that differ from the record, with their inputs, and the
    error of the predictions. Exit code 1 if any differs.
    """
    from baton.lab.replay.command import run_replay
    from baton.lab.replay.predict import WhatIf

    raise typer.Exit(run_replay(bundle, WhatIf(tuple(without or ()), add_prefill, add_decode), json))
