"""Command `baton replay`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from baton.cli import options
from baton.cli.options import flags_of, of_field
from baton.worker.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class ReplayFlags:
    """Flags of `baton replay`."""

    without: Annotated[
        list[str] | None, typer.Option(help="Id of a request that does not arrive; may be repeated.")
    ] = None
    add_prefill: Annotated[int, typer.Option(min=0, max=64, help="Number of added prefill workers.")] = 0
    add_decode: Annotated[int, typer.Option(min=0, max=64, help="Number of added decode workers.")] = 0
    truth: Annotated[
        Path | None, typer.Option(help="Bundle of a run with the change, whose TTFT the predictions are compared with.")
    ] = None
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the recorded model; the engine computes the steps of a bundle written --with-tokens."
        ),
    ] = None
    dtype: str = of_field(WorkerConfig, "dtype")
    quantize: str = of_field(WorkerConfig, "quantize")
    kv_cache_dtype: str = of_field(WorkerConfig, "kv_cache_dtype")
    json: options.Json = False


@flags_of
def replay(
    bundle: Annotated[Path, typer.Argument(help="Archive of `baton bundle`, or a record.json.")], flags: ReplayFlags
) -> None:
    """Replay a bundle: decide its placements and plan its steps again, and predict each TTFT, also after a change.

    Prints the first placement and the first step of each worker that differ from the record, with their inputs, and the
    error of the predictions. With --model, the engine computes the steps on this CPU and compares each sampled token.
    Exit code 1 if anything differs.
    """
    from baton.lab.replay.command import run_replay
    from baton.lab.replay.predict import WhatIf

    engine = None
    if flags.model is not None:
        from baton.lab.replay.engine import RecordedModel

        engine = RecordedModel(flags.model, flags.dtype, flags.kv_cache_dtype, flags.quantize)
    what_if = WhatIf(tuple(flags.without or ()), flags.add_prefill, flags.add_decode)
    raise typer.Exit(run_replay(bundle, what_if, flags.json, flags.truth, engine))
