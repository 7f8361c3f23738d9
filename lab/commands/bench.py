"""Flags of `baton bench` and its subcommands."""

import os
import shlex
from collections.abc import Sequence
from enum import StrEnum, auto
from pathlib import Path
from typing import Annotated, Literal

import typer

from baton.cli import options
from baton.cli.options import DEFAULT_TARGET, TARGET_VARIABLE, Dtype, read_sizes

Threads = Annotated[int | None, typer.Option(min=1, help="Threads; default: the cores that this process may use.")]
Batch = Annotated[str, typer.Option(help="Sequences at once; several sizes: 1,16.")]


def cores() -> int:
    return len(os.sched_getaffinity(0))


def curves(
    model: options.ModelFolder = None,
    batch: Annotated[str, typer.Option(help="Sequences at once, of --batch-context tokens.")] = "1,2,4,8,12,16,24,32",
    batch_context: Annotated[int, typer.Option(min=1, help="Tokens of context, where the batch grows.")] = 512,
    lengths: Annotated[
        str,
        typer.Option(help="Tokens of prompts, and of context at batch 1; at most what the model has positions for."),
    ] = "64,128,256,512,1024,2048,4096,8192",
    steps: Annotated[int, typer.Option(min=1, help="Decode steps for each point.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions; the median counts.")] = 3,
    threads: Threads = None,
    dtype: Dtype = "auto",
    quantize: options.Quantize = "none",
    folder: Annotated[Path | None, typer.Option(help="Also write curves.json and three pictures (SVG) there.")] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> None:
    """Measure how a decode step and a prompt grow with batch and context, next to the growth of the machine's
    limits.
    """
    from baton.lab.benchmarks.engine.curves import CurvesOptions, run_curves

    asked = CurvesOptions(
        model=model,
        batches=options.read_sizes(batch, "--batch"),
        batch_context_tokens=batch_context,
        lengths=options.read_sizes(lengths, "--lengths"),
        steps=steps,
        rounds=rounds,
        threads=threads or cores(),
        dtype=dtype,
        quantize=quantize,
    )
    raise typer.Exit(run_curves(asked, folder, json))


DEFAULT_FOLDER = Path("~/.cache/baton/peers")


def peers(
    model: options.ModelFolder = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=4, help="Decode steps of each round.")] = 48,
    batch: Batch = "1,16",
    threads: Threads = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the engines take turns in each.")] = 7,
    precision: Annotated[
        Literal["bf16", "int8", "int4", "all"], typer.Option(help="Precision of weights and products.")
    ] = "all",
    only: Annotated[list[str] | None, typer.Option(help="Name of a peer, such as llama.cpp; may be repeated.")] = None,
    peers_folder: Annotated[
        Path, typer.Option(help="Folder of the peers and of converted checkpoints.")
    ] = DEFAULT_FOLDER,
    json: Annotated[bool, typer.Option("--json", help="All rounds as JSON instead of a table.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Also draw the ratios, as SVG, into this file.")] = None,
) -> None:
    """The same work on Baton's engine and on OpenVINO, vLLM, llama.cpp and transformers, in turns, on this CPU.

    A peer that is not installed is absent from the comparison; lab/benchmarks/README.md says how to. Compare within one
    run only.
    """
    from baton.lab.benchmarks.peers.compare import PeersOptions, run_peers_bench
    from baton.lab.benchmarks.peers.process import PEERS, Precision

    known = [peer.name for peer in PEERS if peer.environment is not None]
    for name in only or ():
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint="--only")
    asked = PeersOptions(
        model=model,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        batches=read_sizes(batch, "--batch"),
        threads=threads or cores(),
        rounds=rounds,
        precisions=tuple(Precision) if precision == "all" else (Precision(precision),),
        folder=peers_folder.expanduser().absolute(),
        only=tuple(only or ()),
    )
    raise typer.Exit(run_peers_bench(asked, json, picture))


GOODPUT_HELP = "Objectives of a good request, in milliseconds: ttft:500 tpot:50, also e2el."
ADDRESSES = (
    "grpc://host:port of a router, or the URL before /completions of any other server; may be repeated. Default: "
    f"grpc://{DEFAULT_TARGET}, or the router that {TARGET_VARIABLE} names."
)

RangeRatio = Annotated[
    float, typer.Option(min=0.0, max=0.99, help="Lengths are drawn from the mean * (1 - this) to * (1 + this).")
]
Burstiness = Annotated[
    float, typer.Option(min=0.01, help="Burstiness of --rate; 1: a Poisson process, below 1: bunched, above 1: even.")
]
VocabSize = Annotated[
    int | None, typer.Option(min=8, help="Prompts are random ids below it; default: the server's, or 1000.")
]
TokenizerFolder = Annotated[
    Path | None,
    typer.Option(help="Folder of a tokenizer.json: HTTP servers get text instead of token ids."),
]


def read_objectives(parts: Sequence[str]) -> dict[str, float]:
    """Parse objectives such as `ttft:500`. Raises: typer.BadParameter."""
    from baton.lab.benchmarks.serve.load import OBJECTIVES

    objectives: dict[str, float] = {}
    for part in parts:
        name, _, ms = part.partition(":")
        try:
            objectives[name] = float(ms)
        except ValueError as error:
            raise typer.BadParameter(f"{part!r} is not like ttft:500", param_hint="--goodput") from error
        if name not in OBJECTIVES:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(OBJECTIVES)}", param_hint="--goodput")
    return objectives


def serve(
    target: Annotated[list[str], typer.Option(help=ADDRESSES)] = [],  # noqa: B006
    model: Annotated[
        list[str], typer.Option(help="Model that requests name; one for all targets, or one for each.")
    ] = [],  # noqa: B006
    rate: Annotated[float | None, typer.Option(help="Open loop: requests per second; inf sends all at once.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Closed loop: so many requests at a time.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 100,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of prompts, the mean.")] = 1024,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of answers, the mean.")] = 128,
    prefix_len: Annotated[int, typer.Option(min=0, help="Tokens that all prompts begin with, beside --input-len.")] = 0,
    range_ratio: RangeRatio = 0.0,
    burstiness: Burstiness = 1.0,
    goodput: Annotated[list[str], typer.Option(help=GOODPUT_HELP)] = [],  # noqa: B006
    more_goodput: Annotated[list[str], typer.Argument(metavar="[GOODPUT]...", help="More of them.")] = [],  # noqa: B006
    vocab_size: VocabSize = None,
    tokenizer: TokenizerFolder = None,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="API key for HTTP servers.")] = "",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for each request.")] = 600.0,
    seed: Annotated[int, typer.Option(help="The same seed makes the same requests.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="A list of objects, one for each target.")] = False,
) -> None:
    """A service under load, of Baton or with OpenAI's completions: TTFT, TPOT, ITL, goodput as vLLM defines them.

    Needs one of --rate and --concurrency. Exit code 1 where requests failed.
    """
    from baton.lab.benchmarks.serve.serve import Arrivals, Lengths, ServeBenchOptions, run_serve_bench
    from baton.lab.benchmarks.serve.targets import Servers

    if (rate is None) == (concurrency is None):
        raise typer.BadParameter("exactly one of --rate and --concurrency is needed")
    if rate is not None and not rate > 0:
        raise typer.BadParameter("must be above 0", param_hint="--rate")
    targets = tuple(target) or (f"grpc://{os.environ.get(TARGET_VARIABLE) or DEFAULT_TARGET}",)
    servers = Servers(targets, tuple(model), vocab_size, tokenizer, api_key, timeout)
    load = ServeBenchOptions(
        servers,
        Arrivals(rate, burstiness, concurrency),
        Lengths(input_len, output_len, prefix_len, range_ratio),
        requests,
        read_objectives([*goodput, *more_goodput]),
        seed,
    )
    raise typer.Exit(run_serve_bench(load, json))


def isolation(
    model: options.ModelFolder = None,
    quantize: options.Quantize = "none",
    variants: Annotated[
        str, typer.Option(help="Any of 1p1d, colocated, vllm; measured in this order.")
    ] = "1p1d,colocated",
    vllm_python: Annotated[
        Path | None, typer.Option(help="Python of an environment with vLLM for CPUs; adds vllm to --variants.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.5, help="Measured seconds of each phase.")] = 10.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the variants take turns in each.")] = 5,
    answers: Annotated[int, typer.Option(min=1, help="Long answers at once.")] = 4,
    answer_prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens of each long answer.")] = 64,
    answer_tokens: Annotated[
        int, typer.Option(min=16, help="Most tokens of each long answer, which must outlast the phases.")
    ] = 4096,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt sent beside the answers.")] = 1024,
    prompts_per_s: Annotated[float, typer.Option(min=0.01, help="Prompts per second in the paced phase.")] = 1.0,
    in_flight: Annotated[int, typer.Option(min=1, help="Prompts at a time in the saturated phase.")] = 3,
    slo_tbt_ms: Annotated[float, typer.Option(min=0.1, help="TBT objective: a later token is not in time.")] = 50.0,
    slo_ttft_ms: Annotated[
        float, typer.Option(min=0.1, help="TTFT objective: a later first token is not in time.")
    ] = 2000.0,
    up_flags: Annotated[str, typer.Option(help="More flags for `baton up`, as one text.")] = "",
    picture: Annotated[Path | None, typer.Option(help="File for a picture (SVG) of p99 TBT.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One object, with every round, instead of a table.")] = False,
) -> None:
    """Measure how much prompts disturb running answers: time between tokens with and without them.

    Starts and ends the servers itself. Needs two cores, and a machine with nothing else to do.
    """
    from baton.lab.benchmarks.isolation.figures import Objectives
    from baton.lab.benchmarks.isolation.isolation import IsolationOptions, Variant, run_isolation_bench
    from baton.lab.benchmarks.isolation.load import PhaseLoad

    try:
        chosen = [Variant(name.strip()) for name in variants.split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--variants") from error
    if vllm_python is not None and Variant.VLLM not in chosen:
        chosen.append(Variant.VLLM)
    if vllm_python is None and Variant.VLLM in chosen:
        raise typer.BadParameter("vllm needs --vllm-python", param_hint="--variants")
    load = PhaseLoad(seconds, answers, answer_prompt_tokens, answer_tokens, prompt_tokens, prompts_per_s, in_flight)
    asked = IsolationOptions(
        model,
        quantize,
        tuple(dict.fromkeys(chosen)),
        rounds,
        load,
        Objectives(slo_ttft_ms, slo_tbt_ms),
        vllm_python,
        picture,
        tuple(shlex.split(up_flags)),
    )
    raise typer.Exit(run_isolation_bench(asked, json))


class FilesSeen(StrEnum):
    NONE = auto()
    KNOWN = auto()
    UNKNOWN = auto()


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
    files: Annotated[
        FilesSeen, typer.Option(help="Files below the caches: none, known to placements, or only to the workers.")
    ] = FilesSeen.NONE,
    file_blocks: Annotated[int, typer.Option(min=64, help="Bound of a worker's files, in blocks.")] = 20_000,
    file_gb_per_s: Annotated[float, typer.Option(min=0.001, help="How fast a worker loads them.")] = 6.0,
    workers_per_directory: Annotated[int, typer.Option(min=1, help="Workers that read each other's files.")] = 4,
    pictures: Annotated[Path | None, typer.Option(help="Folder for pictures (SVG).")] = None,
    scaled: Annotated[
        bool,
        typer.Option("--scaled", help="Measure the cost of a decision with more workers and longer prompts instead."),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="An object instead of a table; of several policies a list.")
    ] = False,
) -> None:
    """Replay a trace through the placement: hits, balance, time to first token. Workers are simulated, the placement is
    not.

    A block of a prompt is a hit if, when its turn comes on its worker, it and all before it are in the worker's cache;
    blocks enter the cache when the prompt has been computed. The bounds are those of one cache of the same size
    together, and of one without end, on which each prompt is computed before the next comes.
    """
    from baton.lab.benchmarks.placement.files import FileOptions
    from baton.lab.benchmarks.placement.route import POLICIES, RouteOptions, run_route
    from baton.lab.benchmarks.placement.simulation import Speeds
    from baton.lab.benchmarks.placement.traces import SHAPES
    from baton.lab.benchmarks.router.decision import run_scaled

    names = POLICIES if policy == "all" else tuple(policy.split(","))
    if unknown := set(names) - set(POLICIES):
        raise typer.BadParameter(f"{unknown.pop()}; there are {', '.join(POLICIES)}", param_hint="--policy")
    if shape not in SHAPES:
        raise typer.BadParameter(f"there are {', '.join(SHAPES)}", param_hint="--shape")
    if scaled:
        raise typer.Exit(run_scaled(pictures, json))
    speeds = Speeds(prefill_tokens_per_s=prefill_tokens_per_s, token_gap_ms=token_gap_ms)
    below = None
    if files is not FilesSeen.NONE:
        below = FileOptions(file_blocks, workers_per_directory, file_gb_per_s, files is FilesSeen.KNOWN)
    options = RouteOptions(trace, shape, seed, names, workers, blocks_per_worker, speed, speeds, below)
    raise typer.Exit(run_route(options, pictures, json))


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
    from baton.lab.benchmarks.router.cost import GatewayBenchOptions, run_gateway_bench

    raise typer.Exit(run_gateway_bench(GatewayBenchOptions(streams, interval_ms, seconds, rounds, requests), json))


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
    from baton.lab.benchmarks.router.cost import RouterBenchOptions, run_router_bench

    asked = RouterBenchOptions(streams, interval_ms, flood_ms, seconds, workers, prompt_tokens, decisions, delays)
    raise typer.Exit(run_router_bench(asked, json))


def engine(
    model: options.ModelFolder = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=1, help="Decode steps that are measured.")] = 48,
    batch: Batch = "1,16",
    threads: Threads = None,
    dtype: Dtype = "auto",
    quantize: options.Quantize = "none",
    kv_cache_dtype: options.KvCacheDtype = "auto",
    step_tokens: Annotated[int, typer.Option(min=1, help="Most prompt tokens of one step.")] = 512,
    json: Annotated[bool, typer.Option("--json", help="A list of objects instead of a table.")] = False,
) -> None:
    """Prefill tokens per second and decode step of the engine on this CPU, beside the machine's limits."""
    from baton.lab.benchmarks.engine.speed import EngineBenchOptions, run_engine_bench

    asked = EngineBenchOptions(
        model=model,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        batches=options.read_sizes(batch, "--batch"),
        threads=threads or cores(),
        dtype=dtype,
        quantize=quantize,
        kv_cache_dtype=kv_cache_dtype,
        step_tokens=step_tokens,
    )
    raise typer.Exit(run_engine_bench(asked, json))


app = typer.Typer(
    no_args_is_help=True, help="Measure this machine and what Baton makes of it. Only `serve` needs a running server."
)
for command in (curves, peers, serve, isolation, route, gateway, router, engine):
    app.command()(command)
