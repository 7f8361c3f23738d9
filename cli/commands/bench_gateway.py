"""`baton bench gateway`: its flags."""

from typing import Annotated

import typer


def gateway(
    streams: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 64,
    interval_ms: Annotated[float, typer.Option(min=0.1, help="Milliseconds between two tokens of a stream.")] = 50.0,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each measurement.")] = 5.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which gRPC and HTTP take turns.")] = 5,
    requests: Annotated[
        int, typer.Option(min=10, help="Requests whose first token is timed, for gRPC and for HTTP.")
    ] = 200,
    json: Annotated[bool, typer.Option("--json", help="An object instead of a table.")] = False,
) -> None:
    """Cost of HTTP beside gRPC: CPU time of a streamed token, TTFT. The workers compute nothing."""
    from cli.bench.gateway import GatewayBenchOptions, run_gateway_bench

    asked = GatewayBenchOptions(
        streams=streams, interval_ms=interval_ms, seconds=seconds, rounds=rounds, requests=requests
    )
    raise typer.Exit(run_gateway_bench(asked, json))
