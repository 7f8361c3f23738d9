"""Flags of `baton chaos`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer


@dataclass(frozen=True, kw_only=True)
class ChaosFlags:
    minutes: Annotated[float, typer.Option(min=0.05, help="Minutes of load and faults.")] = 5.0
    seed: Annotated[int, typer.Option(help="Seed of faults and requests.")] = 0
    streams: Annotated[int, typer.Option(min=1, max=256, help="Clients, each with one stream at a time.")] = 12
    faults: Annotated[
        int | None, typer.Option(min=1, help="Number of proven faults to reach, then stop; default: as time allows.")
    ] = None
    speculate: Annotated[
        Literal["off", "ngram"], typer.Option(help="Speculative decoding in the workers, as with `baton up`.")
    ] = "off"
    tier: Annotated[bool, typer.Option(help="Keep KV in files below small pools, and inject disk and file faults.")] = (
        True
    )
    routers: Annotated[
        int | None,
        typer.Option(
            min=2, max=4, help="Number of routers on one port; default: 2 with a port each. Not with --hosts."
        ),
    ] = None
    hosts: Annotated[
        int | None,
        typer.Option(
            min=3,
            max=5,
            help="Number of hosts (network namespaces; needs root) that run the processes; links and hosts fail too. "
            "Without KV files and clock jumps.",
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for report, charts and logs; default: a new one, kept if the run fails."),
    ] = None
