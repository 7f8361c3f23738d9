"""`baton up`: its flags."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from baton.cli.options import (
    VARIABLES_PREFIX,
    Adapters,
    KvCacheDtype,
    KvMemory,
    ModelFolder,
    Quantize,
    checked,
    flags_of,
    parse_bytes,
)
from baton.launch.devices import DeviceChoice
from baton.launch.process_plan import COLOCATED_TBT_SLO_MS, Exposure


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """None: found out by `up`, or left to the processes."""

    model: ModelFolder = None
    model_name: Annotated[
        str | None,
        typer.Option(
            help="Name of the model in requests; of a path the last part. Default: the folder's name, or the hub id."
        ),
    ] = None
    prefill: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=64,
            help="Number of prefill workers; default: half of the GPUs, in groups of --tensor-parallel, or 1 on a CPU. "
            "0: decode workers compute prompts.",
        ),
    ] = None
    decode: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Number of decode workers; default: the other GPUs, or 1 on a CPU."),
    ] = None
    colocated: Annotated[
        bool,
        typer.Option(
            "--colocated",
            help="No prefill workers: each decode worker computes its prompts itself, between the steps of its "
            "answers; --tbt-slo-ms bounds how long answers wait for prompts.",
        ),
    ] = False
    host: Annotated[
        str, typer.Option(help="Address of the public ports; one beyond loopback needs --api-keys or --insecure.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65534, help="Public port; 0 takes a free one.")] = 50051
    admin_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Admin port, on loopback; default: --port plus 1.")
    ] = None
    http_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port of OpenAI's HTTP API, on --host; 0 takes a free one. Default: 8000, or a free one if that is "
            "taken. Further routers take the ports after it.",
        ),
    ] = None
    routers: Annotated[
        int,
        typer.Option(
            min=1,
            max=16,
            help="Number of routers, which share what they know; the second listens two ports after the first. "
            "Clients may name several: --target 127.0.0.1:50051,127.0.0.1:50053.",
        ),
    ] = 1
    placement: Annotated[
        Literal["cache_aware", "prefix_hash", "least_tokens", "round_robin"],
        typer.Option(help="Placement policy: how workers are chosen for a request (docs/routing.md)."),
    ] = "cache_aware"
    planner: Annotated[
        Literal["off", "propose", "act"],
        typer.Option(
            help="Role planner. act: workers change between prefill and decode with the load; propose: only shows it."
        ),
    ] = "propose"
    tool_format: Annotated[
        Literal["auto", "harmony", "deepseek", "mistral", "pythonic", "glm", "qwen_coder", "hermes", "llama"],
        typer.Option(help="How the model writes calls of functions. auto: as its chat template has it."),
    ] = "auto"
    device: Annotated[DeviceChoice, typer.Option(help="Device that workers compute on.")] = DeviceChoice.AUTO
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(
            help="What the model computes in. auto: the checkpoint's own, but float32 on a CPU without bf16 arithmetic."
        ),
    ] = "auto"
    adapter: Adapters = None
    quantize: Quantize = "none"
    kv_cache_dtype: KvCacheDtype = "auto"
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=16384,
            help="Tokens per KV block; default: 32, or as many that a state is at most half of a block.",
        ),
    ] = None
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Longest prompt plus answer, in tokens; default: the model's.")
    ] = None
    kv_memory: KvMemory = None
    swap_memory: Annotated[
        int | None,
        typer.Option(
            parser=checked(parse_bytes),
            metavar="256MiB",
            help="Host memory of each decode worker for KV of preempted answers, allocated when first needed. 0: the "
            "KV is recomputed. Default: 256MiB.",
        ),
    ] = None
    kv_tier_memory: Annotated[
        int | None,
        typer.Option(
            parser=checked(parse_bytes),
            metavar="8GiB",
            help="Host memory of each worker for KV that outlives its eviction from the pool; for GPUs. Default: none.",
        ),
    ] = None
    kv_tier_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory for KV that survives eviction and restarts (docs/memory.md), for all workers. It holds "
            "what prompts said, readable by this user alone. Default: none."
        ),
    ] = None
    kv_tier_size: Annotated[
        int | None,
        typer.Option(
            parser=checked(parse_bytes),
            metavar="100GiB",
            help="Bound of each worker's files in --kv-tier-dir. Default: 16GiB.",
        ),
    ] = None
    tbt_slo_ms: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Longest step of a decode worker with prompts in it, in milliseconds: how long running answers may "
            "wait for a token. Higher values give earlier first tokens and more throughput, lower ones smoother "
            f"answers. Default: {COLOCATED_TBT_SLO_MS:g} with --colocated; otherwise prompts make a step at most a "
            "tenth longer.",
        ),
    ] = None
    speculate: Annotated[
        Literal["off", "ngram", "draft"],
        typer.Option(
            help="Speculative decoding: tokens are computed beside the newest one, where that pays. ngram: those that "
            "followed the same ones earlier in the prompt or the answer; draft: those of --draft-model. It changes no "
            "answer."
        ),
    ] = "off"
    draft_model: Annotated[
        str | None,
        typer.Option(help="Folder or Hugging Face id of a small model of the same vocabulary, for --speculate draft."),
    ] = None
    transport: Annotated[
        Literal["auto", "shared_memory", "cuda_ipc", "nixl", "nccl", "gloo", "tcp", "grpc"],
        typer.Option(help="Transport of KV from prefill to decode. auto: the fastest available."),
    ] = "auto"
    tensor_parallel: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="Ranks of each worker, each with its share of heads, weights and KV: one GPU per rank, or on CPU a "
            "share of the worker's cores.",
        ),
    ] = 1
    log_format: Annotated[Literal["plain", "json"], typer.Option(help="Format of log lines.")] = "plain"
    namespace: Annotated[
        str | None, typer.Option(help="Name of the cluster on a shared Redis; default: baton-PORT.")
    ] = None
    trace_file: Annotated[
        Path | None, typer.Option(help="File that traces are appended to; default: a new one in runtime/.")
    ] = None
    api_keys: Annotated[
        Path | None,
        typer.Option(
            envvar="BATON_API_KEYS",
            exists=True,
            dir_okay=False,
            help="File of API keys (baton keys new); requests without a valid key are refused. Reloaded when it "
            "changes.",
        ),
    ] = None
    insecure: Annotated[
        bool, typer.Option("--insecure", envvar="BATON_INSECURE", help="Allow --host beyond loopback without keys.")
    ] = False
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            envvar="BATON_TLS_CERT",
            exists=True,
            dir_okay=False,
            help="Certificate (PEM) of the public ports, which then accept TLS only (baton certs). Needs --tls-key.",
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option(envvar="BATON_TLS_KEY", exists=True, dir_okay=False, help="Private key (PEM) of --tls-cert."),
    ] = None
    startup_timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait until the service is ready.")] = 600

    @property
    def prefill_workers(self) -> int | None:
        return 0 if self.colocated else self.prefill

    @property
    def exposure(self) -> Exposure:
        return Exposure(self.api_keys, self.insecure, self.tls_cert, self.tls_key)


@flags_of
def up(options: UpOptions) -> None:
    """Start router, workers and Redis on this machine; Ctrl-C drains and stops them."""
    if options.colocated and options.prefill:
        raise typer.BadParameter("--colocated allows no prefill workers", param_hint="--prefill")
    if (options.speculate == "draft") != (options.draft_model is not None):
        raise typer.BadParameter("goes together with --speculate draft", param_hint="--draft-model")
    if (options.tls_cert is None) != (options.tls_key is None):
        raise typer.BadParameter("goes together with --tls-key", param_hint="--tls-cert")
    from baton.cli.up import run_up

    raise typer.Exit(run_up(replace(options, adapter=_separated(options.adapter or []))))


def _separated(given: list[str]) -> list[str]:
    """A variable has commas between adapters, as processes read it; it comes split at white space."""
    text = os.environ.get(f"{VARIABLES_PREFIX}_ADAPTER", "")
    return text.split(",") if text and given == text.split() else given
