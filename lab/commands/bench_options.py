"""Flags of `baton bench`: one dataclass per benchmark, which is passed to it unchanged."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from pathlib import Path
from typing import Annotated, Literal

import typer

from baton.cli.options import DEFAULT_TARGET, TARGET_VARIABLE, Dtype, KvCacheDtype, ModelFolder, Quantize, read_sizes

Batch = Annotated[str, typer.Option(help="Numbers of concurrent sequences to measure, such as 1,16.")]
ComputeDtype = Annotated[Literal["float32", "bfloat16"], typer.Option(help="Compute dtype of Baton and vLLM.")]
ThreadCount = Annotated[int | None, typer.Option(min=1, help="Threads; default: the cores that this process may use.")]


@dataclass(frozen=True, kw_only=True)
class ModelBenchOptions:
    """Flags of the benchmarks that load a model into this process."""

    model: ModelFolder = None
    threads: ThreadCount = None

    @property
    def thread_count(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))


@dataclass(frozen=True, kw_only=True)
class CurvesOptions(ModelBenchOptions):
    batch: Annotated[str, typer.Option(help="Numbers of concurrent sequences, each of --batch-context tokens.")] = (
        "1,2,4,8,12,16,24,32"
    )
    batch_context: Annotated[int, typer.Option(min=1, help="Context of each sequence for --batch, in tokens.")] = 512
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths, and contexts at batch 1, in tokens; cut to the model's context.")
    ] = "64,128,256,512,1024,2048,4096,8192"
    steps: Annotated[int, typer.Option(min=1, help="Decode steps for each point.")] = 16
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions; the median counts.")] = 3
    dtype: Dtype = "auto"
    quantize: Quantize = "none"
    folder: Annotated[Path | None, typer.Option(help="Folder for curves.json and three charts (SVG).")] = None
    json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False

    @property
    def batches(self) -> tuple[int, ...]:
        return read_sizes(self.batch, "--batch")


@dataclass(frozen=True, kw_only=True)
class PeersOptions(ModelBenchOptions):
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512
    new_tokens: Annotated[int, typer.Option(min=4, help="Decode steps of each round.")] = 48
    batch: Batch = "1,16"
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the engines take turns in each.")] = 7
    precision: Annotated[
        Literal["bf16", "int8", "int4", "all"], typer.Option(help="Precision of weights and products.")
    ] = "all"
    only: Annotated[list[str] | None, typer.Option(help="Name of a peer, such as llama.cpp; may be repeated.")] = None
    peers_folder: Annotated[Path, typer.Option(help="Folder of the peers and of converted checkpoints.")] = Path(
        "~/.cache/baton/peers"
    )
    json: Annotated[bool, typer.Option("--json", help="All rounds as JSON instead of a table.")] = False
    picture: Annotated[Path | None, typer.Option(help="File for a chart (SVG) of the ratios.")] = None

    @property
    def batches(self) -> tuple[int, ...]:
        return read_sizes(self.batch, "--batch")

    @property
    def folder(self) -> Path:
        return self.peers_folder.expanduser().absolute()


OBJECTIVES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, kw_only=True)
class ServeBenchOptions:
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="grpc://host:port of a router, or the URL before /completions of any other server; may be repeated. "
            f"Default: grpc://{DEFAULT_TARGET}, or the router that {TARGET_VARIABLE} names."
        ),
    ] = None
    model: Annotated[
        list[str] | None, typer.Option(help="Model that requests name; one for all targets, or one for each.")
    ] = None
    rate: Annotated[
        float | None, typer.Option(help="Open loop: requests per second; inf sends all of them immediately.")
    ] = None
    concurrency: Annotated[int | None, typer.Option(min=1, help="Closed loop: number of concurrent requests.")] = None
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 100
    input_len: Annotated[int, typer.Option(min=1, help="Mean number of prompt tokens.")] = 1024
    output_len: Annotated[int, typer.Option(min=1, help="Mean number of output tokens.")] = 128
    prefix_len: Annotated[
        int, typer.Option(min=0, help="Tokens that all prompts begin with, in addition to --input-len.")
    ] = 0
    range_ratio: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="Lengths are drawn from the mean * (1 - this) to * (1 + this).")
    ] = 0.0
    burstiness: Annotated[
        float,
        typer.Option(min=0.01, help="Burstiness of --rate; 1: a Poisson process, below 1: bunched, above 1: even."),
    ] = 1.0
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Objectives of a good request, in milliseconds: ttft:500 tpot:50, also e2el."),
    ] = None
    more_goodput: Annotated[
        list[str] | None, typer.Argument(metavar="[GOODPUT]...", help="More objectives after --goodput.")
    ] = None
    vocab_size: Annotated[
        int | None, typer.Option(min=8, help="Prompts are random ids below it; default: the server's, or 1000.")
    ] = None
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of a tokenizer.json: HTTP servers get text instead of token ids.")
    ] = None
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="API key for HTTP servers.")] = ""
    timeout: Annotated[float, typer.Option(min=0.1, help="Timeout of each request, in seconds.")] = 600.0
    seed: Annotated[int, typer.Option(help="Seed of prompts, lengths and arrivals.")] = 0
    json: Annotated[bool, typer.Option("--json", help="A list of objects, one for each target.")] = False

    @property
    def targets(self) -> Sequence[str]:
        return self.target or (f"grpc://{os.environ.get(TARGET_VARIABLE) or DEFAULT_TARGET}",)

    @property
    def objectives_ms(self) -> dict[str, float]:
        """Maximum times of a request that counts as goodput, by name in OBJECTIVES. Raises: typer.BadParameter."""
        objectives: dict[str, float] = {}
        for part in (*(self.goodput or ()), *(self.more_goodput or ())):
            name, _, ms = part.partition(":")
            try:
                objectives[name] = float(ms)
            except ValueError as error:
                raise typer.BadParameter(
                    f"{part!r} is not NAME:MILLISECONDS, such as ttft:500", param_hint="--goodput"
                ) from error
            if name not in OBJECTIVES:
                raise typer.BadParameter(f"{name!r} is none of {', '.join(OBJECTIVES)}", param_hint="--goodput")
        return objectives


class Variant(StrEnum):
    SPLIT = "1p1d"
    COLOCATED = "colocated"
    VLLM = "vllm"


@dataclass(frozen=True, kw_only=True)
class IsolationOptions:
    model: ModelFolder = None
    dtype: ComputeDtype = "bfloat16"
    quantize: Quantize = "none"
    variants: Annotated[str, typer.Option(help="Any of 1p1d, colocated, vllm; measured in this order.")] = (
        "1p1d,colocated"
    )
    vllm_python: Annotated[
        Path | None, typer.Option(help="Python of an environment with vLLM for CPUs; adds vllm to --variants.")
    ] = None
    seconds: Annotated[float, typer.Option(min=0.5, help="Measured seconds of each phase.")] = 10.0
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the variants take turns in each.")] = 5
    answers: Annotated[int, typer.Option(min=1, help="Number of concurrent long answers.")] = 4
    answer_prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens of each long answer.")] = 64
    answer_tokens: Annotated[
        int, typer.Option(min=16, help="Most tokens of each long answer, which must outlast the phases.")
    ] = 4096
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each prompt sent while the long answers run.")
    ] = 1024
    prompts_per_s: Annotated[float, typer.Option(min=0.01, help="Prompts per second in the paced phase.")] = 1.0
    in_flight: Annotated[int, typer.Option(min=1, help="Prompts in flight in the saturated phase.")] = 3
    slo_tbt_ms: Annotated[float, typer.Option(min=0.1, help="TBT objective: a later token is not in time.")] = 50.0
    slo_ttft_ms: Annotated[float, typer.Option(min=0.1, help="TTFT objective: a later first token is not in time.")] = (
        2000.0
    )
    up_flags: Annotated[str, typer.Option(help="More flags for `baton up`, as one text.")] = ""
    picture: Annotated[Path | None, typer.Option(help="File for a chart (SVG) of p99 TBT.")] = None
    json: Annotated[bool, typer.Option("--json", help="One object, with every round, instead of a table.")] = False

    @property
    def chosen(self) -> tuple[Variant, ...]:
        """Variants in the order in which they are measured. Raises: typer.BadParameter."""
        try:
            named = [Variant(name.strip()) for name in self.variants.split(",")]
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--variants") from error
        if self.vllm_python is not None:
            named.append(Variant.VLLM)
        elif Variant.VLLM in named:
            raise typer.BadParameter("vllm needs --vllm-python", param_hint="--variants")
        return tuple(dict.fromkeys(named))

    @property
    def more_up_flags(self) -> list[str]:
        return shlex.split(self.up_flags)


@dataclass(frozen=True, kw_only=True)
class GoodputOptions:
    model: ModelFolder = None
    dtype: ComputeDtype = "float32"
    rates: Annotated[str, typer.Option(help="Requests per second, such as 0.3,0.6; each is an open loop.")] = (
        "0.3,0.6,0.9,1.2"
    )
    seconds: Annotated[float, typer.Option(min=1, help="Time in which requests arrive, for each rate.")] = 60.0
    requests: Annotated[
        int | None, typer.Option(min=1, help="Number of requests for each rate, instead of --seconds.")
    ] = None
    drain: Annotated[
        float, typer.Option(min=0, help="Longest wait after the last arrival, in seconds; later answers are missed.")
    ] = 60.0
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; in each, the systems take turns at each rate.")] = 3
    saturation: Annotated[
        int, typer.Option(min=0, help="Requests in flight in the closed loop that measures tokens/s; 0: no such loop.")
    ] = 16
    mix: Annotated[
        str, typer.Option(help="Shares and lengths of requests, SHARE*INPUT/OUTPUT, separated by commas.")
    ] = "0.75*96-256/64-160,0.25*512-768/16-48"
    trace: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Requests of a Mooncake (.jsonl) or Azure (.csv) trace."),
    ] = None
    max_prompt: Annotated[int, typer.Option(min=1, help="Prompts of a trace are cut to this number of tokens.")] = 2048
    max_answer: Annotated[int, typer.Option(min=1, help="Answers of a trace are cut to this number of tokens.")] = 256
    long_prompt: Annotated[
        int, typer.Option(min=1, help="Fewest tokens of a prompt whose TTFT is reported among the long ones.")
    ] = 512
    ttft_slo_ms: Annotated[float, typer.Option(min=0.1, help="TTFT objective of a good request.")] = 2000.0
    tbt_slo_ms: Annotated[
        float, typer.Option(min=0.1, help="Objective of the 99th percentile of a request's gaps between tokens.")
    ] = 50.0
    baton: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:FLAGS", help="Another Baton to measure, with flags of `baton up`; may be repeated."),
    ] = None
    vllm_python: Annotated[
        Path | None, typer.Option(help="Python of an environment with vLLM for CPUs; default: that of --peers-folder.")
    ] = None
    vllm_chunks: Annotated[
        str, typer.Option(help="Values of vLLM's --max-num-batched-tokens to measure in addition, such as 128,512.")
    ] = ""
    vllm_seqs: Annotated[str, typer.Option(help="Values of vLLM's --max-num-seqs, combined with --vllm-chunks.")] = ""
    vllm_flags: Annotated[str, typer.Option(help="More flags of vLLM's server, as one text.")] = ""
    vllm_kv_gib: Annotated[int, typer.Option(min=1, help="vLLM's KV cache, in GiB.")] = 4
    peers_folder: Annotated[Path, typer.Option(help="Folder of the peers' environments.")] = Path(
        "~/.cache/baton/peers"
    )
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=URL",
            help="Running server to measure: grpc://host:port of a Baton, or the URL before /completions of a peer.",
        ),
    ] = None
    server: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:COMMAND",
            help="Another peer to start: a command of an OpenAI server with GET /health. {port} and {model} "
            "in it stand for the port to listen on and the model's folder.",
        ),
    ] = None
    systems: Annotated[
        str, typer.Option(help="Names of the systems to measure, separated by commas; default: all.")
    ] = ""
    seed: Annotated[int, typer.Option(help="Seed of lengths, prompts and arrivals.")] = 0
    pictures: Annotated[Path | None, typer.Option(help="Folder for three charts (SVG).")] = None
    json: Annotated[Path | None, typer.Option(help="File for all rounds and the verdict.")] = None

    @property
    def rate_values(self) -> tuple[float, ...]:
        """Rates in ascending order. Raises: typer.BadParameter."""
        try:
            rates = sorted({float(part) for part in self.rates.split(",")})
        except ValueError as error:
            raise typer.BadParameter(f"{self.rates!r} is not a list such as 0.3,0.6", param_hint="--rates") from error
        if not all(0 < rate < float("inf") for rate in rates):
            raise typer.BadParameter("rates must be above 0 and finite", param_hint="--rates")
        return tuple(rates)

    @property
    def baton_variants(self) -> dict[str, str]:
        """Flags of `baton up` for each variant, by name of the variant. Raises: typer.BadParameter."""
        more = [_named(text, ":", "--baton") for text in self.baton or ()]
        return {str(Variant.SPLIT): "", str(Variant.COLOCATED): "--colocated", **dict(more)}

    @property
    def server_commands(self) -> dict[str, str]:
        """Commands that start the servers, by name of the server. Raises: typer.BadParameter."""
        return dict(_named(text, ":", "--server") for text in self.server or ())

    @property
    def running_targets(self) -> dict[str, str]:
        """URLs of the running servers, by name of the server. Raises: typer.BadParameter."""
        return dict(_named(text, "=", "--target") for text in self.target or ())

    @property
    def vllm_interpreter(self) -> Path:
        return self.vllm_python or self.peers_folder.expanduser().absolute() / "vllm" / "bin" / "python"

    @property
    def vllm_chunk_sizes(self) -> tuple[int, ...]:
        return read_sizes(self.vllm_chunks, "--vllm-chunks") if self.vllm_chunks else ()

    @property
    def vllm_seq_counts(self) -> tuple[int, ...]:
        return read_sizes(self.vllm_seqs, "--vllm-seqs") if self.vllm_seqs else ()

    @property
    def chosen_systems(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.systems.split(",") if name.strip())


def _named(text: str, separator: str, flag: str) -> tuple[str, str]:
    """Split the value of a flag at `separator` into a name and a value. Raises: typer.BadParameter."""
    name, found, value = text.partition(separator)
    if not found or not name.strip():
        raise typer.BadParameter(f"{text!r} is not NAME{separator}VALUE", param_hint=flag)
    return name.strip(), value.strip()


class FilesSeen(StrEnum):
    NONE = auto()
    KNOWN = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, kw_only=True)
class RouteOptions:
    trace: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A trace of Mooncake (.jsonl) or Azure (.csv).")
    ] = None
    shape: Annotated[
        str,
        typer.Option(help="Or a generated one: chat, agents, tenants, documents, hot_document or oversized_prefix."),
    ] = "chat"
    seed: Annotated[int, typer.Option(help="Seed of the generated trace.")] = 0
    policy: Annotated[str, typer.Option(help="Placement policies, separated by commas; all: every known policy.")] = (
        "cache_aware"
    )
    workers: Annotated[
        int, typer.Option(min=1, max=10_000, help="Number of prefill workers, and of decode workers.")
    ] = 8
    blocks_per_worker: Annotated[int, typer.Option(min=1, help="Cache of a worker, in blocks of 512 tokens.")] = 5000
    speed: Annotated[float, typer.Option(min=0.001, help="Factor by which requests arrive faster than recorded.")] = 1.0
    prefill_tokens_per_s: Annotated[float, typer.Option(min=1, help="Prefill speed of one worker.")] = 20_000.0
    token_gap_ms: Annotated[float, typer.Option(min=0.01, help="Milliseconds between tokens of a single answer.")] = 8.0
    files: Annotated[
        FilesSeen, typer.Option(help="KV files below the caches: none, known to placements, or only to the workers.")
    ] = FilesSeen.NONE
    file_blocks: Annotated[int, typer.Option(min=64, help="Bound of a worker's files, in blocks.")] = 20_000
    file_gb_per_s: Annotated[float, typer.Option(min=0.001, help="Load rate of a worker's files, in GB/s.")] = 6.0
    workers_per_directory: Annotated[int, typer.Option(min=1, help="Workers that read each other's files.")] = 4
    pictures: Annotated[Path | None, typer.Option(help="Folder for charts (SVG).")] = None
    scaled: Annotated[
        bool,
        typer.Option("--scaled", help="Measure the cost of a decision with more workers and longer prompts instead."),
    ] = False
    json: Annotated[bool, typer.Option("--json", help="An object instead of a table; of several policies a list.")] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class GatewayBenchOptions:
    streams: Annotated[int, typer.Option(min=1, help="Number of concurrent streams.")] = 64
    interval_ms: Annotated[float, typer.Option(min=0.1, help="Milliseconds between two tokens of a stream.")] = 50.0
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each measurement.")] = 5.0
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which gRPC and HTTP take turns.")] = 5
    requests: Annotated[
        int, typer.Option(min=10, help="Requests whose first token is timed, for gRPC and for HTTP.")
    ] = 200
    json: Annotated[bool, typer.Option("--json", help="An object instead of a table.")] = False


@dataclass(frozen=True, kw_only=True)
class RouterBenchOptions:
    streams: Annotated[int, typer.Option(min=1, help="Number of concurrent streams.")] = 256
    interval_ms: Annotated[float, typer.Option(min=0.1, help="Milliseconds between two tokens of a stream.")] = 50.0
    flood_ms: Annotated[
        float, typer.Option(min=0.1, help="Milliseconds between two tokens in the phase that saturates a core.")
    ] = 12.8
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each measurement.")] = 10.0
    workers: Annotated[int, typer.Option(min=2, help="Workers to choose from.")] = 16
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Prompt tokens of the requests that are placed.")] = 8192
    decisions: Annotated[int, typer.Option(min=1, help="Requests that are placed.")] = 2000
    delays: Annotated[int, typer.Option(min=2, help="Tokens whose delay is measured.")] = 1000
    json: Annotated[bool, typer.Option("--json", help="An object instead of text.")] = False


SCALE_PARTS = ("workers", "faults", "window", "long")


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    only: Annotated[str, typer.Option(help=f"Parts to measure: any of {', '.join(SCALE_PARTS)}.")] = ",".join(
        SCALE_PARTS
    )
    workers: Annotated[str, typer.Option(help="Numbers of simulated workers, half of them prefill workers.")] = (
        "10,100,500,1000,2550"
    )
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Tokens of the prompts that extend known ones.")] = 100_000
    seconds: Annotated[float, typer.Option(min=1, help="Measured seconds with each number of workers.")] = 10.0
    requests: Annotated[int, typer.Option(min=1, help="Requests while workers die and hang.")] = 1536
    long_prompt_tokens: Annotated[int, typer.Option(min=64, help="Tokens of the long prompt beside answers.")] = 200_000
    json: Annotated[bool, typer.Option("--json", help="An object instead of text.")] = False

    @property
    def worker_counts(self) -> tuple[int, ...]:
        return read_sizes(self.workers, "--workers")

    @property
    def parts(self) -> frozenset[str]:
        """Parts to measure. Raises: typer.BadParameter."""
        parts = frozenset(part.strip() for part in self.only.split(","))
        if unknown := parts.difference(SCALE_PARTS):
            raise typer.BadParameter(f"{min(unknown)!r} is none of {', '.join(SCALE_PARTS)}", param_hint="--only")
        return parts


@dataclass(frozen=True, kw_only=True)
class EngineBenchOptions(ModelBenchOptions):
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512
    new_tokens: Annotated[int, typer.Option(min=1, help="Decode steps that are measured.")] = 48
    batch: Batch = "1,16"
    dtype: Dtype = "auto"
    quantize: Quantize = "none"
    kv_cache_dtype: KvCacheDtype = "auto"
    step_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of prompt tokens of one step.")] = 512
    json: Annotated[bool, typer.Option("--json", help="A list of objects instead of a table.")] = False

    @property
    def batches(self) -> tuple[int, ...]:
        return read_sizes(self.batch, "--batch")


@dataclass(frozen=True, kw_only=True)
class AgentsOptions:
    only: Annotated[list[str] | None, typer.Option("--only", help="Agents to run; may be repeated. Default: all.")] = (
        None
    )
    turns: Annotated[int, typer.Option(min=1, help="Calls of a tool in a session.")] = 30
    kills: Annotated[
        bool,
        typer.Option("--kills", help="Kill a decode worker, the prefill worker, Redis and the router in a session."),
    ] = False
    folder: Annotated[Path, typer.Option(help="Folder of the installed agents.")] = Path("~/.cache/agents")
    pictures: Annotated[Path | None, typer.Option(help="Folder for a chart (SVG) of each agent.")] = None
    json: Annotated[bool, typer.Option("--json", help="An object instead of a table.")] = False
