"""`baton up`: its flags."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from baton.cli.options import (
    VARIABLES_PREFIX,
    Adapters,
    Dtype,
    KvCacheDtype,
    KvMemory,
    ModelFolder,
    Quantize,
    flags_of,
    of_field,
)
from baton.decode_worker.config import DecodeConfig
from baton.launch.devices import DeviceChoice
from baton.launch.process_plan import COLOCATED_TBT_SLO_MS, Exposure
from baton.process.worker_config import WorkerConfig
from baton.router.config import RouterConfig


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """None: found out by `up`, or left to the processes."""

    PANELS: ClassVar[Mapping[str, str]] = {
        "model": "Model",
        "device": "Workers",
        "placement": "Speed",
        "kv_memory": "Memory",
        "host": "Addresses and access",
        "log_format": "Run",
    }
    """Titles in `--help`, by the first field below each."""

    model: ModelFolder = None
    model_name: Annotated[
        str | None,
        typer.Option(
            help="Name of the model in requests; of a path the last part. Default: the folder's name, or the hub id."
        ),
    ] = None
    adapter: Adapters = None
    dtype: Dtype = "auto"
    quantize: Quantize = "none"
    kv_cache_dtype: KvCacheDtype = "auto"
    max_model_len: Annotated[int | None, of_field(WorkerConfig, "max_model_len", note="Default: the model's.")] = None
    tool_format: Annotated[
        Literal["auto", "harmony", "deepseek", "mistral", "pythonic", "glm", "qwen_coder", "hermes", "llama"],
        of_field(RouterConfig, "tool_format"),
    ] = "auto"
    device: Annotated[DeviceChoice, typer.Option(help="Device that workers compute on.")] = DeviceChoice.AUTO
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
    tensor_parallel: Annotated[int, of_field(WorkerConfig, "tensor_parallel")] = 1
    routers: Annotated[
        int,
        typer.Option(
            min=1,
            max=16,
            help="Number of routers, which share what they know; the second listens two ports after the first. "
            "Clients may name several: --target 127.0.0.1:50051,127.0.0.1:50053.",
        ),
    ] = 1
    planner: Annotated[Literal["off", "propose", "act"], of_field(RouterConfig, "planner")] = "propose"
    placement: Annotated[
        Literal["cache_aware", "prefix_hash", "least_tokens", "round_robin"], of_field(RouterConfig, "placement")
    ] = "cache_aware"
    tbt_slo_ms: Annotated[
        float | None, of_field(DecodeConfig, "tbt_slo_ms", note=f"Default with --colocated: {COLOCATED_TBT_SLO_MS:g}.")
    ] = None
    speculate: Annotated[Literal["off", "ngram", "draft"], of_field(DecodeConfig, "speculate")] = "off"
    draft_model: Annotated[
        str | None, of_field(DecodeConfig, "draft_model", note="Or its name on the Hugging Face hub.")
    ] = None
    transport: Annotated[
        Literal["auto", "shared_memory", "cuda_ipc", "nixl", "nccl", "gloo", "tcp", "grpc"],
        of_field(WorkerConfig, "transport"),
    ] = "auto"
    kv_memory: KvMemory = None
    block_size: Annotated[int | None, of_field(WorkerConfig, "block_size")] = None
    swap_memory: Annotated[int | None, of_field(DecodeConfig, "swap_memory")] = None
    kv_tier_memory: Annotated[int | None, of_field(WorkerConfig, "kv_tier_memory")] = None
    kv_tier_dir: Annotated[Path | None, of_field(WorkerConfig, "kv_tier_dir")] = None
    kv_tier_size: Annotated[int | None, of_field(WorkerConfig, "kv_tier_size")] = None
    host: Annotated[
        str,
        of_field(RouterConfig, "host", note="Of all public ports; beyond loopback it needs --api-keys or --insecure."),
    ] = "127.0.0.1"
    port: Annotated[int, of_field(RouterConfig, "port")] = 50051
    http_port: Annotated[
        int | None,
        of_field(
            RouterConfig,
            "http_port",
            note="Default: 8000, or a free one if that is taken. Further routers take the ports after it.",
        ),
    ] = None
    admin_port: Annotated[
        int | None, of_field(RouterConfig, "admin_port", note="On loopback; default here: --port plus 1.")
    ] = None
    api_keys: Annotated[Path | None, of_field(RouterConfig, "api_keys", exists=True, dir_okay=False)] = None
    insecure: Annotated[bool, of_field(RouterConfig, "insecure", "--insecure")] = False
    tls_cert: Annotated[Path | None, of_field(RouterConfig, "tls_cert", exists=True, dir_okay=False)] = None
    tls_key: Annotated[Path | None, of_field(RouterConfig, "tls_key", exists=True, dir_okay=False)] = None
    log_format: Annotated[Literal["plain", "json"], of_field(WorkerConfig, "log_format")] = "plain"
    trace_file: Annotated[
        Path | None, of_field(RouterConfig, "trace_file", note="Default here: a new one in runtime/.")
    ] = None
    namespace: Annotated[str | None, of_field(RouterConfig, "namespace", note="Default here: baton-PORT.")] = None
    strict_env: Annotated[bool, of_field(RouterConfig, "strict_env", "--strict-env")] = False
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
