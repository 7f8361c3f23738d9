"""`baton bench curves`: its flags."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from cli import options


def curves(
    model: Annotated[str | None, typer.Option(help="Folder or Hugging Face id; default: the demo model.")] = None,
    batch: Annotated[str, typer.Option(help="Sequences at once, of --batch-context tokens.")] = "1,2,4,8,12,16,24,32",
    batch_context: Annotated[int, typer.Option(min=1, help="Tokens of context, where the batch grows.")] = 512,
    lengths: Annotated[
        str,
        typer.Option(help="Tokens of prompts, and of context at batch 1; at most what the model has positions for."),
    ] = "64,128,256,512,1024,2048,4096,8192",
    steps: Annotated[int, typer.Option(min=1, help="Decode steps for each point.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions; the median counts.")] = 3,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; default: the cores that this process may use.")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], typer.Option(help="Type that the model computes in.")
    ] = "auto",
    quantize: options.Quantize = "none",
    folder: Annotated[Path | None, typer.Option(help="Also write curves.json and three pictures (SVG) there.")] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> None:
    """How the cost of a decode step and of a prompt grows, beside how it grows at this machine's limits."""
    from cli.bench.curves import CurvesOptions, run_curves

    asked = CurvesOptions(
        model=model,
        batches=options.read_sizes(batch, "--batch"),
        batch_context_tokens=batch_context,
        lengths=options.read_sizes(lengths, "--lengths"),
        steps=steps,
        rounds=rounds,
        threads=threads or len(os.sched_getaffinity(0)),
        dtype=dtype,
        quantize=quantize,
    )
    raise typer.Exit(run_curves(asked, folder, json))
