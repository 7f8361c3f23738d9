"""`baton bench`: its subcommands and their flags."""

import os
from typing import Annotated, Literal

import typer

from cli import options
from cli.commands import (
    bench_attention,
    bench_curves,
    bench_gateway,
    bench_isolation,
    bench_linear,
    bench_peers,
    bench_route,
    bench_router,
    bench_serve,
)

app = typer.Typer(
    no_args_is_help=True, help="Measure this machine and what Baton makes of it. Only `serve` needs a running server."
)
app.command()(bench_attention.attention)
app.command()(bench_linear.linear)
app.command()(bench_curves.curves)
app.command()(bench_peers.peers)
app.command()(bench_serve.serve)
app.command()(bench_isolation.isolation)
app.command()(bench_route.route)
app.command()(bench_gateway.gateway)
app.command()(bench_router.router)


@app.command()
def engine(
    model: Annotated[str | None, typer.Option(help="Folder or Hugging Face id; default: the demo model.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=1, help="Decode steps that are measured.")] = 48,
    batch: Annotated[str, typer.Option(help="Sequences at once; several sizes: 1,16.")] = "1,16",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; default: the cores that this process may use.")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], typer.Option(help="Type that the model computes in.")
    ] = "auto",
    quantize: options.Quantize = "none",
    kv_cache_dtype: options.KvCacheDtype = "auto",
    step_tokens: Annotated[int, typer.Option(min=1, help="Most prompt tokens of one step.")] = 512,
    json: Annotated[bool, typer.Option("--json", help="A list of objects instead of a table.")] = False,
) -> None:
    """Prefill tokens per second and decode step of the engine on this CPU, beside the machine's limits."""
    from cli.bench.engine import EngineBenchOptions, run_engine_bench

    asked = EngineBenchOptions(
        model=model,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        batches=options.read_sizes(batch, "--batch"),
        threads=threads or len(os.sched_getaffinity(0)),
        dtype=dtype,
        quantize=quantize,
        kv_cache_dtype=kv_cache_dtype,
        step_tokens=step_tokens,
    )
    raise typer.Exit(run_engine_bench(asked, json))
