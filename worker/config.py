"""Configuration that prefill and decode workers share: addresses, model, memory, cores, transfers."""

from ipaddress import ip_address
from pathlib import Path
from typing import Literal

from baton.process.config import (
    REQUIRED,
    Adapters,
    ByteSize,
    Cores,
    Field,
    InternalTlsConfig,
    ListenConfig,
    LogConfig,
    ModelSettings,
    ProcessConfig,
    RegistryConfig,
    TelemetryConfig,
    check,
    field_of,
)
from baton.process.serving.addresses import Address
from baton.text.model_options import GPU_MEMORY_UTILIZATION, ComputeDtype, KvCacheDtype, Quantize

KV_BYTES = ByteSize(256 * 2**20)
KV_TIER_BYTES = ByteSize(16 * 2**30)
REPORT_PERIOD_S = 0.2

NEED_INTERFACE = ("nixl", "nccl", "gloo")
"""Transports that need `--transfer-interface`."""


class WorkerConfig(ListenConfig, ProcessConfig, RegistryConfig, InternalTlsConfig, LogConfig, TelemetryConfig):
    """Configuration of a worker of either role."""

    worker_id: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="Stable name of this worker.")
    advertise: str | None = Field(None, description="Host at which other processes reach this worker; default: --host.")
    health_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="Port for health checks alone, without TLS: for probes that have no --internal-tls-cert.",
    )
    model: Path = field_of(ModelSettings, "model", default=REQUIRED)
    model_name: str = field_of(ModelSettings, "model_name", default="model")
    adapter: Adapters = Field(
        (), description="NAME=FOLDER of a LoRA adapter; requests choose it by NAME. May be repeated."
    )
    device: str = Field(
        "cpu", pattern=r"^(cpu|cuda(:\d{1,2})?)$", description="Device: cpu, cuda:N, or cuda for the first GPU."
    )
    dtype: ComputeDtype = Field(
        "auto",
        description="Compute dtype; auto: the checkpoint's, or float32 on a CPU without bf16 arithmetic.",
    )
    quantize: Quantize = Field("none", description="Quantisation of a plain checkpoint's weights while loading.")
    kv_cache_dtype: KvCacheDtype = Field("auto", description="Dtype of the KV cache; auto: the same as --dtype.")
    block_size: int | None = Field(
        None,
        ge=1,
        le=16384,
        description="Tokens per KV block, equal on all workers; default: 32, or enough that a recurrent state "
        "takes at most half of a block.",
    )
    max_model_len: int | None = Field(None, ge=2, description="Maximum length of prompt plus answer, in tokens.")
    kv_memory: ByteSize | Literal["auto"] = Field(
        KV_BYTES, gt=0, description="Size of the KV pool, for example 512MiB; auto: on a GPU, the memory that is left."
    )
    kv_tier_memory: ByteSize = Field(
        ByteSize(0), ge=0, description="Host memory for evicted KV, used before --kv-tier-dir; 0: none."
    )
    kv_tier_dir: Path | None = Field(
        None,
        description="Directory for KV that survives eviction and restarts, shared by the workers of a "
        "machine. It contains prompt data and is readable by this user alone.",
    )
    kv_tier_size: ByteSize = Field(
        KV_TIER_BYTES, gt=0, description="Maximum size of this worker's files in --kv-tier-dir, for example 100GiB."
    )
    kv_tier_load: Literal["auto", "always"] = Field(
        "auto", description="Condition for loading KV from a tier; auto: if loading is faster than computing."
    )
    gpu_memory_utilization: float = Field(
        GPU_MEMORY_UTILIZATION,
        gt=0,
        le=1,
        description="Share of the GPU's memory for this worker if --kv-memory is auto.",
    )
    graphs: bool = Field(True, description="Record steps as CUDA graphs on a GPU.")
    prefill_attention: Literal["auto", "triton", "sdpa", "flashinfer"] = Field(
        "auto",
        description="Attention of prompts on a GPU: Baton's kernel, PyTorch's over gathered KV, or "
        "FlashInfer's; auto: the fastest for each length, measured at start.",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="Number of ranks that share heads, weights and KV. On a CPU they share --cores; on GPUs "
        "they use --device and the ones after it. Prefill and decode may differ.",
    )
    core_use: Path | None = Field(
        None, description="File of one byte that says whether this worker's --cores are computing now."
    )
    transfer_cores: Cores | None = Field(None, description="Cores for copying KV, apart from those that compute.")
    pair_timeout_s: float = Field(5.0, gt=0, description="Timeout for pairing with another worker, in seconds.")
    transport: Literal["auto", "shared_memory", "cuda_ipc", "nixl", "nccl", "gloo", "tcp", "grpc"] = Field(
        "auto", description="Transport of KV; auto: the fastest available. Any other value allows that one only."
    )
    transfer_interface: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.@-]{1,15}$",
        description="Network interface on which nixl, nccl (GPU) or gloo (CPU) may connect and listen, for "
        "example eth0.",
    )
    transfer_port: int = Field(
        0, ge=0, le=65535, description="Port at --host on which other workers read KV over TCP; 0: any free port."
    )
    report_period_s: float = Field(REPORT_PERIOD_S, gt=0, le=1, description="Period of reports to routers, in seconds.")
    checksum_share: float = Field(
        0.001, ge=0, le=1, description="Share of transferred KV blocks whose checksums are compared."
    )
    kv_check_share: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Share of reused cached blocks that are compared with their stored checksums (CPU only).",
    )
    stall_s: float = Field(
        30.0,
        ge=1,
        description="Time without progress of engine or event loop, in seconds, after which the process exits "
        "with code 3.",
    )
    session_grace_s: float = Field(
        10.0,
        gt=0,
        le=600,
        description="Time for which the requests of a disconnected router are kept and other routers may "
        "adopt them, in seconds.",
    )
    chunk_tokens: int = Field(
        512, ge=1, description="Maximum number of tokens per step; a decode step exceeds it if more sequences run."
    )
    lease_s: float = Field(
        5.0, gt=0, description="Time for which KV stays pinned while its reader reads nothing, in seconds."
    )

    @property
    def speculates(self) -> bool:
        """Return whether decode steps compute drafted tokens."""
        return False

    @property
    def draft(self) -> tuple[Path, int] | None:
        """Return the folder of the draft model and the size of its KV pool in bytes; None: no draft model."""
        return None

    @property
    def swap_bytes(self) -> int:
        """Return the host memory for KV of preempted sequences, in bytes."""
        return 0

    @property
    def listens_at(self) -> tuple[Address, ...]:
        transfer = Address("--transfer-port", self.host, self.transfer_port)
        return (*super().listens_at, transfer, Address("--health-port", self.host, self.health_port or 0))

    @check
    def _peers_can_connect(self) -> None:
        _ = self.advertised_host

    @check
    def _names_differ(self) -> None:
        if self.model_name in (each.name for each in self.adapter):
            raise ValueError(f"--adapter: the name {self.model_name!r} is the model's; choose another")

    @check
    def _groups_have_an_interface(self) -> None:
        if self.transport in NEED_INTERFACE and self.transfer_interface is None:
            raise ValueError(f"--transport {self.transport} needs --transfer-interface")

    @property
    def kv_memory_bytes(self) -> int | None:
        """Return the size of the KV pool in bytes; None: the memory that is left on the GPU."""
        if self.kv_memory != "auto":
            return int(self.kv_memory)
        return int(KV_BYTES) if self.device == "cpu" else None

    @property
    def advertised_host(self) -> str:
        """Return the advertised host. Raises: ValueError for a wildcard address or an invalid host."""
        host = self.advertise or self.host
        if host in ("0.0.0.0", "::"):
            raise ValueError("--advertise (BATON_ADVERTISE) must name a host when --host is a wildcard address")
        if ":" in host and not _is_address(host):
            raise ValueError(
                f"--advertise (BATON_ADVERTISE) {host}: give a host or an address, without brackets and port"
            )
        return host


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
