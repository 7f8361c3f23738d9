"""Options of `baton up`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from baton.cli.options import KV_MEMORY_NOTE, Adapters, ModelFolder, of_field
from baton.decode_worker.config import DecodeConfig
from baton.launch.devices import CORES_PER_ROUTER, CPU_WORKERS_PER_ROUTER, MAX_ROUTERS, DeviceChoice
from baton.router.config import RouterConfig
from baton.worker.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """Options of `baton up`. None: `up` or its processes choose the value."""

    PANELS: ClassVar[Mapping[str, str]] = {
        "model": "Model",
        "device": "Workers",
        "placement": "Speed",
        "kv_memory": "Memory",
        "host": "Addresses and access",
        "log_format": "Run",
    }
    """Titles in `--help`, by the first field of each group."""

    model: ModelFolder = None
    model_name: Annotated[
        str | None,
        typer.Option(
            help="Name of the model in requests; of a path the last part. Default: the folder's name, or the hub id."
        ),
    ] = None
    adapter: Adapters = None
    dtype: str = of_field(WorkerConfig, "dtype")
    quantize: str = of_field(WorkerConfig, "quantize")
    kv_cache_dtype: str = of_field(WorkerConfig, "kv_cache_dtype")
    max_model_len: int | None = of_field(WorkerConfig, "max_model_len", note="Default: the model's.")
    tool_format: str = of_field(RouterConfig, "tool_format")
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
            help="No prefill workers: each decode worker computes its prompts itself, between decode steps; "
            "--tbt-slo-ms bounds how long prompts delay answers.",
        ),
    ] = False
    tensor_parallel: int = of_field(WorkerConfig, "tensor_parallel")
    routers: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_ROUTERS,
            help="Number of routers, which share --port, --http-port and their state; default: one for each GPU "
            f"worker or every {CPU_WORKERS_PER_ROUTER} CPU workers, at most one for every {CORES_PER_ROUTER} cores, at "
            "least 1.",
        ),
    ] = None
    planner: str = of_field(RouterConfig, "planner")
    placement: str = of_field(RouterConfig, "placement")
    ttft_slo_ms: float = of_field(RouterConfig, "ttft_slo_ms")
    tbt_slo_ms: float = of_field(RouterConfig, "tbt_slo_ms")
    strict_tbt: bool = of_field(DecodeConfig, "strict_tbt", "--strict-tbt")
    speculate: str = of_field(DecodeConfig, "speculate")
    draft_model: str | None = of_field(
        DecodeConfig, "draft_model", kind=str, note="Or its name on the Hugging Face hub."
    )
    transport: str = of_field(WorkerConfig, "transport")
    kv_memory: int | None = of_field(WorkerConfig, "kv_memory", note=KV_MEMORY_NOTE)
    block_size: int | None = of_field(WorkerConfig, "block_size")
    swap_memory: int | None = of_field(DecodeConfig, "swap_memory")
    kv_tier_memory: int | None = of_field(WorkerConfig, "kv_tier_memory")
    kv_tier_dir: Path | None = of_field(WorkerConfig, "kv_tier_dir")
    kv_tier_size: int | None = of_field(WorkerConfig, "kv_tier_size")
    host: str = of_field(
        RouterConfig, "host", note="Applies to all public ports; beyond loopback it needs --api-keys or --insecure."
    )
    port: int = of_field(RouterConfig, "port")
    http_port: int | None = of_field(
        RouterConfig,
        "http_port",
        default=None,
        note="Default: 8000, or a free port if 8000 is in use. With several routers, the following ports are those of "
        "each router alone, for its metrics.",
    )
    admin_port: int | None = of_field(
        RouterConfig,
        "admin_port",
        default=None,
        note="On loopback; default here: --port plus 1. Further routers use the following ports.",
    )
    api_keys: Path | None = of_field(RouterConfig, "api_keys", exists=True, dir_okay=False)
    insecure: bool = of_field(RouterConfig, "insecure", "--insecure")
    tls_cert: Path | None = of_field(RouterConfig, "tls_cert", exists=True, dir_okay=False)
    tls_key: Path | None = of_field(RouterConfig, "tls_key", exists=True, dir_okay=False)
    batch_dir: Path | None = of_field(RouterConfig, "batch_dir")
    log_format: str = of_field(WorkerConfig, "log_format")
    trace_file: Path | None = of_field(RouterConfig, "trace_file", note="Default here: a new one in runtime/.")
    namespace: str | None = of_field(RouterConfig, "namespace", default=None, note="Default here: baton-PORT.")
    strict_env: bool = of_field(RouterConfig, "strict_env", "--strict-env")
    startup_timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait until the service is ready.")] = 600

    @property
    def prefill_workers(self) -> int | None:
        return 0 if self.colocated else self.prefill
