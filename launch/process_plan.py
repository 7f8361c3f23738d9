"""Which processes make up a service on one machine, and how each is called: settings in, commands out."""

import secrets
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from baton import IMPORT_PATH
from baton.launch import CommandFailed
from baton.launch.devices import CorePlan, Machine, plan_cores, write_cores
from baton.launch.ports import LOOPBACK
from baton.launch.processes import ProcessSpec, Stage
from baton.process.config import DRAIN_S
from baton.process.registry.redis_server import (
    CONFIGURED_BY_STDIN,
    NOISE,
    RedisServerError,
    find_redis_server,
    free_port,
    password_configuration,
    redis_command,
    redis_url,
)
from baton.process.registry.redis_url import without_password
from baton.process.registry.worker_record import AdapterFolder
from baton.process.serving.addresses import Address

# With -P: our folders are found wherever the user stands, and no folder of the same name there is taken for ours.
OUR_CODE = {"PYTHONPATH": str(IMPORT_PATH)}
COLOCATED_TBT_SLO_MS = 60.0


# Beyond the drain of each process itself, so that SIGKILL is for processes that hang.
ROUTER_END_S = 10.0
WORKER_END_S = 5.0
REDIS_GRACE_S = 5.0
# Of computing prompts, where router, copies and maybe clients share the core: they take moments, a chunk takes long.
PREFILL_NICE = 5
# Between two tokens, where no other worker computes prompts: a tenth of a step would leave them next to nothing. Ten
# tokens a second are still faster than people read.
# Of a GPU that it shares with a decode worker: a step of answers always finds multiprocessors. CUDA takes note of it
# where its MPS daemon runs (nvidia-cuda-mps-control -d); without it, processes take turns on the whole GPU.
PREFILL_GPU_PERCENT = 75
PASSWORD_BYTES = 16
GPU_CHUNK_TOKENS = 4096  # of a step; below that a GPU waits for its memory and for the host


@dataclass(frozen=True, slots=True)
class Exposure:
    """Which clients are served, and over which connections."""

    api_keys: Path | None = None
    insecure: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None

    @property
    def arguments(self) -> list[object]:
        """Of a router."""
        flags = {"--api-keys": self.api_keys, "--tls-cert": self.tls_cert, "--tls-key": self.tls_key}
        return [*_given(flags), *(["--insecure"] if self.insecure else [])]


def _given(flags: Mapping[str, object]) -> list[object]:
    """Those that have a value."""
    return [part for flag, value in flags.items() if value is not None for part in (flag, value)]


@dataclass(frozen=True, slots=True)
class UpSettings:
    """Everything that `baton up` was given or found out. None: the process decides."""

    model_folder: Path
    model_name: str
    machine: Machine
    prefill: int
    decode: int
    host: str
    port: int
    admin_port: int
    more_ports: tuple[tuple[int, int], ...]  # public and admin, of each router beside the first
    http_ports: tuple[int, ...]  # of all routers
    dtype: str
    adapters: tuple[AdapterFolder, ...]
    kv_cache_dtype: str
    quantize: str
    block_size: int | None  # None: by the model
    max_model_len: int | None
    kv_memory_bytes: int | None  # None: the memory that weights and a step leave on the GPU
    swap_memory_bytes: int | None
    kv_tier_memory_bytes: int | None
    kv_tier_dir: Path | None
    kv_tier_size_bytes: int | None
    tbt_slo_ms: float | None
    speculate: str
    draft_model: Path | None
    transport: str
    tensor_parallel: int
    placement: str
    planner: str
    tool_format: str
    log_format: str
    redis_url: str = field(repr=False)  # with its password
    namespace: str
    trace_file: Path
    collector: str | None  # where traces go instead
    core_use: Path  # folder in which workers of a CPU mark whether their cores compute
    exposure: Exposure = Exposure()
    run_id: str = ""
    secret: str = field(default="", repr=False)  # of the run; empty: none
    drain_s: float = DRAIN_S


def plan_processes(settings: UpSettings) -> list[ProcessSpec]:
    """Router and workers; the caller adds Redis."""
    on_cpu = not settings.machine.gpu_free_bytes
    cores = plan_cores(settings.machine.cores, settings.prefill, settings.decode) if on_cpu else None
    routers = [_router(settings, cores, number) for number in range(1 + len(settings.more_ports))]
    decode = [
        _worker(settings, "decode", number, number, cores.decode[number] if cores else (), cores)
        for number in range(settings.decode)
    ]
    prefill = [
        _worker(settings, "prefill", number, settings.decode + number, cores.prefill[number] if cores else (), cores)
        for number in range(settings.prefill)
    ]
    return [*routers, *prefill, *decode]


def router_addresses(host: str, ports: Sequence[tuple[int, int]], http_ports: Sequence[int]) -> list[Address]:
    """Everything that routers listen on. `ports`: public and admin, of each."""
    found: list[Address] = []
    for number, ((public, admin), http) in enumerate(zip(ports, http_ports, strict=True), 1):
        names = ("--port", "--admin-port", "--http-port")
        if number > 1:
            names = (f"router {number}'s port", f"router {number}'s admin port", f"router {number}'s HTTP port")
        found += map(Address, names, (host, LOOPBACK, host), (public, admin, http))
    return found


def router_ports(settings: UpSettings) -> tuple[tuple[int, int], ...]:
    """Public and admin port of each router."""
    return ((settings.port, settings.admin_port), *settings.more_ports)


def _router(settings: UpSettings, cores: CorePlan | None, number: int) -> ProcessSpec:
    port, admin_port = router_ports(settings)[number]
    arguments = ["--host", settings.host, "--port", port, "--admin-port", admin_port]
    arguments += ["--http-host", settings.host, "--http-port", settings.http_ports[number]]
    arguments += ["--placement", settings.placement, "--planner", settings.planner]
    arguments += ["--tool-format", settings.tool_format]
    arguments += ["--model", settings.model_folder, "--trace-file", settings.trace_file, *_shared(settings)]
    arguments += settings.exposure.arguments
    if cores:
        arguments += ["--cores", write_cores(cores.router)]
    name = f"router-{number}" if number else "router"
    return ProcessSpec(
        name, _python("router", arguments), Stage.ROUTER, settings.drain_s + ROUTER_END_S, _environment(settings)
    )


def _worker(
    settings: UpSettings, role: str, number: int, position: int, own: Sequence[int], cores: CorePlan | None
) -> ProcessSpec:
    """`position` counts over all workers: it picks the GPUs."""
    name = f"{role}-{number}"
    arguments = ["--role", role, "--worker-id", name, "--host", LOOPBACK, "--port", 0]
    arguments += ["--model", settings.model_folder, "--model-name", settings.model_name]
    arguments += ["--device", settings.machine.device(position, settings.tensor_parallel), "--dtype", settings.dtype]
    for adapter in settings.adapters:
        arguments += ["--adapter", adapter]
    arguments += ["--kv-cache-dtype", settings.kv_cache_dtype, "--quantize", settings.quantize]
    arguments += _kv_memory(settings)
    arguments += ["--transport", settings.transport, "--trace-file", settings.trace_file, *_shared(settings)]
    has_interface = settings.transport in ("nixl", "nccl", "gloo")
    tbt_slo_ms = settings.tbt_slo_ms or (None if settings.prefill else COLOCATED_TBT_SLO_MS)
    optional = {
        "--chunk-tokens": GPU_CHUNK_TOKENS if settings.machine.gpu_free_bytes else None,
        "--transfer-interface": "lo" if has_interface else None,  # all of us are on this machine
        "--tensor-parallel": settings.tensor_parallel if settings.tensor_parallel > 1 else None,
        "--block-size": settings.block_size,
        "--max-model-len": settings.max_model_len,
        "--swap-memory": settings.swap_memory_bytes,
        "--kv-tier-memory": settings.kv_tier_memory_bytes,
        "--kv-tier-dir": settings.kv_tier_dir,
        "--kv-tier-size": settings.kv_tier_size_bytes,
        "--tbt-slo-ms": tbt_slo_ms,
        "--speculate": None if settings.speculate == "off" else settings.speculate,
        "--draft-model": settings.draft_model,
    }
    arguments += _given(optional)
    environment = _environment(settings)
    if cores:
        arguments += ["--cores", write_cores(own), "--transfer-cores", write_cores(cores.transfer)]
        arguments += ["--core-use", settings.core_use / name]
        if role == "prefill" and number < settings.decode and not set(own) & set(cores.decode[number]):
            lender = f"decode-{number}"
            arguments += ["--spare-cores", write_cores(cores.decode[number])]
            arguments += ["--spare-core-use", settings.core_use / lender]
        environment["OMP_NUM_THREADS"] = str(len(own))
        if role == "prefill" and not set(own).isdisjoint(cores.router):
            arguments += ["--nice", PREFILL_NICE]
    if role == "prefill" and _shares_with_decode(settings, position):
        environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(PREFILL_GPU_PERCENT)
    command = _python("elastic_worker", arguments)
    return ProcessSpec(name, command, Stage.WORKER, settings.drain_s + WORKER_END_S, environment)


def _shares_with_decode(settings: UpSettings, position: int) -> bool:
    """Whether a decode worker computes on the GPU of the worker at this position."""
    machine, degree = settings.machine, settings.tensor_parallel
    if not machine.gpu_free_bytes:
        return False
    return machine.device(position, degree) in {machine.device(decode, degree) for decode in range(settings.decode)}


def _kv_memory(settings: UpSettings) -> list[object]:
    if settings.kv_memory_bytes is not None:
        return ["--kv-memory", settings.kv_memory_bytes]
    share = settings.machine.gpu_share(settings.prefill + settings.decode, settings.tensor_parallel)
    return ["--kv-memory", "auto", "--gpu-memory-utilization", f"{share:.3f}"]


def _shared(settings: UpSettings) -> list[object]:
    return ["--namespace", settings.namespace, "--log-format", settings.log_format]


def _environment(settings: UpSettings) -> dict[str, str]:
    """With the secrets of a process: every user of the machine can read arguments."""
    secret = {"BATON_SECRET": settings.secret, "BATON_SECRET_FILE": ""} if settings.secret else {}
    return {**OUR_CODE, "BATON_REDIS_URL": settings.redis_url, "BATON_RUN_ID": settings.run_id, **secret}


def _python(module: str, arguments: Sequence[object]) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", f"baton.{module}", *map(str, arguments))


@dataclass(frozen=True, slots=True)
class RedisSource:
    """The Redis of `baton up`: the one that it was given, without a `spec`, or a server of our own, with a password."""

    url: str
    spec: ProcessSpec | None

    @property
    def description(self) -> str:
        return without_password(self.url) if self.spec is None else f"{Path(self.spec.command[0]).name} (embedded)"


def choose_redis(given_url: str | None, cores: tuple[int, ...], reserved: Set[int]) -> RedisSource:
    """`reserved`: ports of others. Raises CommandFailed where none is given and none is installed."""
    if given_url:
        return RedisSource(given_url, None)
    try:
        program = find_redis_server()
    except RedisServerError as error:
        raise CommandFailed(str(error)) from error
    port = free_port(reserved)
    password = secrets.token_hex(PASSWORD_BYTES)
    command = (*redis_command(program, port), CONFIGURED_BY_STDIN)
    stdin = password_configuration(password)
    spec = ProcessSpec("redis", command, Stage.REDIS, REDIS_GRACE_S, cores=cores, noise=NOISE, stdin=stdin)
    return RedisSource(redis_url(port, password), spec)
