"""`baton bench serve`: its flags."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cli.options import DEFAULT_TARGET, TARGET_VARIABLE

GOODPUT_HELP = "Objectives of a good request, in milliseconds: ttft:500 tpot:50, also e2el."
ADDRESSES = (
    "grpc://host:port of a router, or the URL before /completions of any other server; may be repeated. Default: "
    f"grpc://{DEFAULT_TARGET}, or the router that {TARGET_VARIABLE} names."
)

TraceFile = Annotated[
    Path | None, typer.Option(help="Open loop: arrivals and lengths of Azure's .csv or Mooncake's .jsonl.")
]
AsTable = Annotated[
    bool, typer.Option("--table", help="Measure prefill and decode tokens per second at --streams at once instead.")
]
PromptTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens of prompts: mean, default 1024 (--table: 512); of a trace: most."),
]
AnswerTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens of answers: the mean, default 128; of a trace: the most.")
]
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
    """Each like `ttft:500`. Raises: typer.BadParameter."""
    from cli.bench.serve_metrics import OBJECTIVES

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


def read_streams(text: str) -> tuple[int, ...]:
    """`1,16`. Raises: typer.BadParameter."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 1,16", param_hint="--streams")
    return tuple(int(part) for part in parts)


def serve(
    target: Annotated[list[str], typer.Option(help=ADDRESSES)] = [],  # noqa: B006
    model: Annotated[
        list[str], typer.Option(help="Model that requests name; one for all targets, or one for each.")
    ] = [],  # noqa: B006
    rate: Annotated[float | None, typer.Option(help="Open loop: requests per second; inf sends all at once.")] = None,
    trace: TraceFile = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Closed loop: so many requests at a time.")] = None,
    table: AsTable = False,
    requests: Annotated[int | None, typer.Option(min=1, help="How many; default: 100, or the whole trace.")] = None,
    input_len: PromptTokens = None,
    output_len: AnswerTokens = None,
    prefix_len: Annotated[int, typer.Option(min=0, help="Tokens that all prompts begin with, beside --input-len.")] = 0,
    range_ratio: RangeRatio = 0.0,
    burstiness: Burstiness = 1.0,
    speed: Annotated[float, typer.Option(min=0.001, help="Speed-up of the recorded trace.")] = 1.0,
    goodput: Annotated[list[str], typer.Option(help=GOODPUT_HELP)] = [],  # noqa: B006
    more_goodput: Annotated[list[str], typer.Argument(metavar="[GOODPUT]...", help="More of them.")] = [],  # noqa: B006
    streams: Annotated[str, typer.Option(help="With --table: numbers of requests at once.")] = "1,16",
    rounds: Annotated[int, typer.Option(min=1, help="With --table: repetitions; medians are shown.")] = 3,
    vocab_size: VocabSize = None,
    tokenizer: TokenizerFolder = None,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="API key for HTTP servers.")] = "",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for each request.")] = 600.0,
    seed: Annotated[int, typer.Option(help="The same seed makes the same requests.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="A list of objects, one for each target.")] = False,
) -> None:
    """A service under load, of Baton or with OpenAI's completions: TTFT, TPOT, ITL, goodput as vLLM defines them.

    Needs one of --rate, --trace, --concurrency or --table. Exit code 1 where requests failed.
    """
    from cli.bench.serve import Arrivals, Lengths, ServeBenchOptions, run_serve_bench
    from cli.bench.serve_servers import Servers
    from cli.bench.serve_streams import TableOptions, run_streams_bench

    if (rate is not None) + (trace is not None) + (concurrency is not None) + table != 1:
        raise typer.BadParameter("exactly one of --rate, --trace, --concurrency and --table is needed")
    if rate is not None and not rate > 0:
        raise typer.BadParameter("must be above 0", param_hint="--rate")
    targets = tuple(target) or (f"grpc://{os.environ.get(TARGET_VARIABLE) or DEFAULT_TARGET}",)
    servers = Servers(targets, tuple(model), vocab_size, tokenizer, api_key, timeout)
    if table:
        asked = TableOptions(servers, read_streams(streams), input_len or 512, output_len or 128, rounds, seed)
        raise typer.Exit(run_streams_bench(asked, json))
    load = ServeBenchOptions(
        servers,
        Arrivals(rate, burstiness, trace, speed, concurrency),
        Lengths(input_len, output_len, prefix_len, range_ratio),
        requests,
        read_objectives([*goodput, *more_goodput]),
        seed,
    )
    raise typer.Exit(run_serve_bench(load, json))
