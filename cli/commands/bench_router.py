"""`baton bench router`: its flags."""

from typing import Annotated

import typer


def router(
    streams: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 256,
    interval_ms: Annotated[float, typer.Option(min=0.1, help="Milliseconds between two tokens of a stream.")] = 50.0,
    flood_ms: Annotated[float, typer.Option(min=0.1, help="The same, for the phase that saturates a core.")] = 12.8,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each measurement.")] = 10.0,
    workers: Annotated[int, typer.Option(min=2, help="Workers to choose from.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Prompt tokens of the requests that are placed.")] = 8192,
    decisions: Annotated[int, typer.Option(min=1, help="Requests that are placed.")] = 2000,
    delays: Annotated[int, typer.Option(min=2, help="Tokens whose delay is measured.")] = 1000,
    json: Annotated[bool, typer.Option("--json", help="An object instead of text.")] = False,
) -> None:
    """Cost of the router itself: a decision, a streamed token, added delay. Its workers compute nothing."""
    from cli.bench.router import RouterBenchOptions, run_router_bench

    asked = RouterBenchOptions(
        streams=streams,
        interval_ms=interval_ms,
        flood_ms=flood_ms,
        seconds=seconds,
        workers=workers,
        prompt_tokens=prompt_tokens,
        decisions=decisions,
        delays=delays,
    )
    raise typer.Exit(run_router_bench(asked, json))
