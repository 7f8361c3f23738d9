"""Flags of `baton size`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import Json, ModelFolder


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    ttft_slo_ms: Annotated[float, typer.Option(min=0.1, help="Longest time to the first token.")]
    tbt_slo_ms: Annotated[float, typer.Option(min=0.01, help="Longest mean time between the tokens of an answer.")]
    share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of requests that must meet both SLOs, in every seed.")
    ] = 0.95
    trace: Annotated[
        Path | None, typer.Option(help="Requests of a Mooncake or Azure trace; its busiest stretches are simulated.")
    ] = None
    speed: Annotated[float, typer.Option(min=0.001, help="Speed-up of the trace.")] = 1.0
    rate: Annotated[float | None, typer.Option(min=0.001, help="Requests per second, instead of a trace.")] = None
    prompt: Annotated[int | None, typer.Option(min=1, help="Mean prompt tokens, with --rate.")] = None
    answer: Annotated[int | None, typer.Option(min=1, help="Mean answer tokens, with --rate.")] = None
    range_ratio: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="Lengths are drawn from the mean * (1 - this) to * (1 + this).")
    ] = 0.0
    curves: Annotated[
        Path | None, typer.Option(help="curves.json of `baton bench curves --folder`. Default: measured first.")
    ] = None
    model: ModelFolder = None
    threads: Annotated[int, typer.Option(min=1, help="Threads of a worker, where curves are measured first.")] = 1
    overheads: Annotated[
        Path | None,
        typer.Option(help="JSON file with the overheads around steps; default: those measured on two cores."),
    ] = None
    kv_bytes_per_token: Annotated[
        float | None, typer.Option(min=1, help="KV bytes per token that a decode worker copies.")
    ] = None
    link_gb_per_s: Annotated[float | None, typer.Option(min=0.001, help="Rate of KV transfers, in GB/s.")] = None
    kv_tokens: Annotated[
        int, typer.Option(min=64, help="Capacity of a worker's KV pool, in tokens; `baton plan` computes it.")
    ] = 100_000
    max_sequences: Annotated[
        int, typer.Option(min=1, max=4096, help="Maximum number of concurrent sequences of a decode worker.")
    ] = 64
    requests: Annotated[int, typer.Option(min=10, help="Requests per seed.")] = 200
    seeds: Annotated[int, typer.Option(min=1, help="Simulations per candidate, each with other arrivals.")] = 5
    most_workers: Annotated[int, typer.Option(min=2, help="Maximum number of workers of both roles together.")] = 32
    prefill_price: Annotated[float, typer.Option(min=0.001, help="Price of a prefill worker, in any unit.")] = 1.0
    decode_price: Annotated[float, typer.Option(min=0.001, help="Price of a decode worker, in the same unit.")] = 1.0
    jobs: Annotated[int, typer.Option(min=1, help="Number of parallel simulations.")] = 2
    json: Json = False
