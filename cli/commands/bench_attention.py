"""`baton bench attention`: its flags."""

import os
import re
from typing import TYPE_CHECKING, Annotated

import typer

from cli import options

if TYPE_CHECKING:
    from cli.bench.attention_work import HeadShape

KV_DTYPES = ("float32", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2")


def attention(
    heads: Annotated[
        str, typer.Option(help="Heads / KV heads x size of a head; several: 9/3x64,32/8x128.")
    ] = "8/8x32,9/3x64,16/8x128,32/4x128",
    kv_dtype: Annotated[str, typer.Option(help="Element types of the KV cache, separated by commas.")] = ",".join(
        KV_DTYPES
    ),
    batch: Annotated[str, typer.Option(help="Sequences of a decode step; several sizes: 1,16.")] = "1,16",
    context: Annotated[str, typer.Option(help="Tokens of each sequence; several sizes: 512,4096.")] = "512,4096",
    chunk: Annotated[int, typer.Option(min=0, help="Tokens of a prompt's chunk; 0: decode alone.")] = 512,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; default: the cores that this process may use.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="A list of objects instead of a table.")] = False,
) -> None:
    """Paged attention of decode and prefill on this CPU, beside the machine's limits and PyTorch's own attention."""
    from cli.bench.attention import AttentionBenchOptions, run_attention_bench

    asked = AttentionBenchOptions(
        shapes=tuple(_shape(part) for part in heads.split(",")),
        kv_dtypes=tuple(_kv_dtype(part) for part in kv_dtype.split(",")),
        batches=options.read_sizes(batch, "--batch"),
        contexts=options.read_sizes(context, "--context"),
        chunk_tokens=chunk,
        threads=threads or len(os.sched_getaffinity(0)),
    )
    raise typer.Exit(run_attention_bench(asked, json))


def _shape(text: str) -> "HeadShape":
    """`9/3x64`. Raises: typer.BadParameter."""
    from cli.bench.attention_work import HeadShape

    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not heads such as 9/3x64", param_hint="--heads")
    shape = HeadShape(*(int(number) for number in found.groups()))
    if shape.heads % shape.kv_heads:
        raise typer.BadParameter(f"{shape}: heads are a multiple of KV heads", param_hint="--heads")
    return shape


def _kv_dtype(text: str) -> str:
    if text not in KV_DTYPES:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(KV_DTYPES)}", param_hint="--kv-dtype")
    return text
