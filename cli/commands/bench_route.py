"""`baton bench route`: its flags."""

from pathlib import Path
from typing import Annotated

import typer


def route(
    trace: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A trace of Mooncake (.jsonl) or Azure (.csv).")
    ] = None,
    shape: Annotated[
        str,
        typer.Option(help="Or a generated one: chat, agents, tenants, documents, hot_document or oversized_prefix."),
    ] = "chat",
    seed: Annotated[int, typer.Option(help="Seed of the generated trace.")] = 0,
    policy: Annotated[
        str, typer.Option(help="Placement policies, separated by commas; all: every one that is known.")
    ] = "cache_aware",
    workers: Annotated[int, typer.Option(min=1, max=10_000, help="Prefill workers, and as many decode workers.")] = 8,
    blocks_per_worker: Annotated[int, typer.Option(min=1, help="Size of a cache, in blocks of 512 tokens.")] = 5000,
    speed: Annotated[float, typer.Option(min=0.001, help="How many times faster the requests come.")] = 1.0,
    prefill_tokens_per_s: Annotated[float, typer.Option(min=1, help="Prefill speed of one worker.")] = 20_000.0,
    token_gap_ms: Annotated[
        float, typer.Option(min=0.01, help="Milliseconds between tokens of a single answer.")
    ] = 8.0,
    pictures: Annotated[Path | None, typer.Option(help="Folder for pictures (SVG).")] = None,
    scaled: Annotated[
        bool,
        typer.Option("--scaled", help="Measure the cost of a decision with more workers and longer prompts instead."),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="An object instead of a table; of several policies a list.")
    ] = False,
) -> None:
    """How placement does on a trace: hits, balance, time to first token. Workers are simulated, the placement is not.

    A block of a prompt is a hit if, when its turn comes on its worker, it and all before it are in the worker's cache;
    blocks enter the cache when the prompt has been computed. The bounds are those of one cache of the same size
    together, and of one without end, on which each prompt is computed before the next comes.
    """
    from cli.bench.route import POLICIES, RouteOptions, run_route
    from cli.bench.route_scale import run_scaled
    from cli.bench.route_shapes import SHAPES
    from cli.bench.route_world import Speeds

    names = POLICIES if policy == "all" else tuple(policy.split(","))
    if unknown := set(names) - set(POLICIES):
        raise typer.BadParameter(f"{unknown.pop()}; there are {', '.join(POLICIES)}", param_hint="--policy")
    if shape not in SHAPES:
        raise typer.BadParameter(f"there are {', '.join(SHAPES)}", param_hint="--shape")
    if scaled:
        raise typer.Exit(run_scaled(pictures, json))
    speeds = Speeds(prefill_tokens_per_s=prefill_tokens_per_s, token_gap_ms=token_gap_ms)
    options = RouteOptions(trace, shape, seed, names, workers, blocks_per_worker, speed, speeds)
    raise typer.Exit(run_route(options, pictures, json))
