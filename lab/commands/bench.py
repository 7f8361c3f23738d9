"""Commands of `baton bench`."""

import typer

from baton.cli.options import flags_of
from baton.lab.commands.bench_options import (
    AgentsOptions,
    CurvesOptions,
    EngineBenchOptions,
    GatewayBenchOptions,
    GoodputOptions,
    IsolationOptions,
    PeersOptions,
    RouteOptions,
    RouterBenchOptions,
    ScaleOptions,
    ServeBenchOptions,
)


@flags_of
def curves(options: CurvesOptions) -> None:
    """Measure how the times of a decode step and a prompt grow with batch and context, next to the machine's limits."""
    from baton.lab.benchmarks.engine.curves import run_curves

    raise typer.Exit(run_curves(options))


@flags_of
def peers(options: PeersOptions) -> None:
    """Compare Baton's engine with OpenVINO, vLLM, llama.cpp and transformers: same work, alternating, on this CPU.

    A peer that is not installed is left out; lab/benchmarks/README.md says how to install it. Compare figures of one
    run only.
    """
    from baton.lab.benchmarks.peers.compare import run_peers_bench
    from baton.lab.benchmarks.peers.process import PEERS

    known = [peer.name for peer in PEERS if peer.environment is not None]
    for name in options.only or ():
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint="--only")
    raise typer.Exit(run_peers_bench(options))


@flags_of
def serve(options: ServeBenchOptions) -> None:
    """Put a service of Baton or of OpenAI's completions under load: TTFT, TPOT, ITL, goodput as vLLM defines them.

    Needs one of --rate and --concurrency. Exit code 1 if a request failed.
    """
    from baton.lab.benchmarks.serve.serve import run_serve_bench

    if (options.rate is None) == (options.concurrency is None):
        raise typer.BadParameter("exactly one of --rate and --concurrency is needed")
    if options.rate is not None and not options.rate > 0:
        raise typer.BadParameter("must be above 0", param_hint="--rate")
    raise typer.Exit(run_serve_bench(options))


@flags_of
def isolation(options: IsolationOptions) -> None:
    """Measure how much prompts disturb running answers: time between tokens with and without them.

    Starts and stops the servers itself. Needs two cores, and a machine with nothing else to do.
    """
    from baton.lab.benchmarks.isolation.isolation import run_isolation_bench

    raise typer.Exit(run_isolation_bench(options))


@flags_of
def goodput(options: GoodputOptions) -> None:
    """Measure which share of requests meets a TTFT and a TBT objective at each rate, for Baton and its peers in turn.

    Starts and stops the servers itself, except those of --target. Needs a machine with nothing else to do.
    """
    from baton.lab.benchmarks.goodput.goodput import run_goodput_bench

    raise typer.Exit(run_goodput_bench(options))


@flags_of
def route(options: RouteOptions) -> None:
    """Replay a trace through the router's placement with simulated workers: hits, balance, time to first token.

    A block of a prompt is a hit if it and all blocks before it are cached on the worker when the prompt starts there;
    blocks enter the cache when the prompt has been computed. For comparison, two bounds: the hits of one cache of the
    workers' total size, and of an unbounded cache, if each prompt were computed before the next arrives.
    """
    from baton.lab.benchmarks.placement.route import POLICIES, policies_of, run_route
    from baton.lab.benchmarks.placement.traces import SHAPES
    from baton.lab.benchmarks.router.decision import run_scaled

    if unknown := set(policies_of(options)) - set(POLICIES):
        raise typer.BadParameter(f"{unknown.pop()!r} is none of {', '.join(POLICIES)}", param_hint="--policy")
    if options.shape not in SHAPES:
        raise typer.BadParameter(f"{options.shape!r} is none of {', '.join(SHAPES)}", param_hint="--shape")
    if options.scaled:
        raise typer.Exit(run_scaled(options.pictures, options.json))
    raise typer.Exit(run_route(options))


@flags_of
def gateway(options: GatewayBenchOptions) -> None:
    """Measure the cost of HTTP next to gRPC: CPU time of a streamed token, TTFT. The workers compute nothing."""
    from baton.lab.benchmarks.router.cost import run_gateway_bench

    raise typer.Exit(run_gateway_bench(options))


@flags_of
def router(options: RouterBenchOptions) -> None:
    """Measure the router's cost per decision and per streamed token, and its delay. The workers compute nothing."""
    from baton.lab.benchmarks.router.cost import run_router_bench

    raise typer.Exit(run_router_bench(options))


@flags_of
def scale(options: ScaleOptions) -> None:
    """Measure a router with up to 2 550 workers and long prompts, and requests that must end while workers die.

    Starts and stops all processes itself. Needs two cores and a Redis server. Exit code 1 if a promise was broken.
    """
    from baton.lab.benchmarks.scale.run import run_scale_bench

    raise typer.Exit(run_scale_bench(options))


@flags_of
def engine(options: EngineBenchOptions) -> None:
    """Measure prefill tokens per second and decode steps of the engine on this CPU, next to the machine's limits."""
    from baton.lab.benchmarks.engine.speed import run_engine_bench

    raise typer.Exit(run_engine_bench(options))


@flags_of
def agents(options: AgentsOptions) -> None:
    """Run sessions of unmodified coding agents with scripted answers of real workers.

    Installs the tested versions from npm and PyPI. Exit code 1 if an agent failed, a tool call was lost, doubled or
    altered, prompts repeat less than 99 % of the earlier turns, or less than 99 % of the tokens that earlier turns have
    computed came from a cache.
    """
    from baton.lab.benchmarks.agents.run import run_agents_bench
    from baton.lab.benchmarks.agents.tested import TESTED

    for name in options.only or ():
        if name not in TESTED:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(TESTED)}", param_hint="--only")
    raise typer.Exit(run_agents_bench(options))


clients_app = typer.Typer(no_args_is_help=True, help="Run programs of others against Baton.")
clients_app.command()(agents)
clients_app.callback()(lambda: None)
app = typer.Typer(
    no_args_is_help=True,
    help="Measure this machine and Baton on it. Only `serve` needs a running server.",
)
app.add_typer(clients_app, name="clients")
for command in (curves, peers, serve, goodput, isolation, route, gateway, router, scale, engine):
    app.command()(command)
