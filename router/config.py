"""Configuration of the router."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

from baton.process.config import (
    ByteSize,
    Field,
    InternalTlsConfig,
    ListenConfig,
    LogConfig,
    ModelSettings,
    ObjectiveConfig,
    ProcessConfig,
    Reader,
    RegistryConfig,
    TelemetryConfig,
    Workers,
    check,
    field_of,
)
from baton.process.security.api_keys import ApiKey, KeyFormatError, KeyStore, parse_key_hashes
from baton.process.serving.addresses import Address, address_of_url, is_loopback
from baton.router.placement.decide import NoPrefillWorker
from baton.router.placement.policies import Strategy

if TYPE_CHECKING:
    from baton.process.security.tls import TlsFiles


def too_open(public_hosts: Iterable[str], admin_host: str, has_keys: bool) -> str:
    """Return the risk that the operator must accept with --insecure; empty if there is none."""
    if not is_loopback(admin_host):
        return f"--admin-host {admin_host}: the admin port has no TLS, so hosts on the path can read and use it"
    beyond = [host for host in public_hosts if not is_loopback(host)]
    if beyond and not has_keys:
        return f"listening on {beyond[0]} without --api-keys accepts every client that reaches it"
    return ""


def warnings(public_hosts: Iterable[str], admin_host: str, has_keys: bool, has_tls: bool) -> list[str]:
    """Return the security warnings that the router logs at its start."""
    hosts = tuple(public_hosts)
    found = []
    if (risk := too_open(hosts, admin_host, has_keys)) != "":
        found.append(f"INSECURE (--insecure): {risk}")
    elif not has_keys:
        found.append(
            "no API keys: every process on this machine may send requests (--api-keys FILE, baton keys new NAME)"
        )
    if has_keys and not has_tls and not all(map(is_loopback, hosts)):
        found.append("API keys and prompts travel unencrypted; --tls-cert and --tls-key turn TLS on")
    return found


_HOST = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


def parse_hosts(text: str) -> tuple[str, ...]:
    """Parse comma-separated host names. Raises: ValueError."""
    hosts = _listed(text)
    for host in hosts:
        if _HOST.fullmatch(host) is None:
            raise ValueError(f"{host!r} is not a host name: NAME, *.NAME or *, without scheme and port")
    return hosts


def parse_origins(text: str) -> tuple[str, ...]:
    """Parse comma-separated origins, as browsers write them. Raises: ValueError."""
    origins = _listed(text)
    for origin in origins:
        parts = urlsplit(origin)
        if origin != "*" and not (parts.netloc and origin.lower() == f"{parts.scheme}://{parts.netloc}".lower()):
            raise ValueError(f"{origin!r} is not an origin: SCHEME://NAME, SCHEME://NAME:PORT or *, without a path")
    return tuple(origin.lower() for origin in origins)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(stripped for each in text.split(",") if (stripped := each.strip()))


Hosts = Annotated[tuple[str, ...], Reader(parse_hosts)]
Origins = Annotated[tuple[str, ...], Reader(parse_origins)]


class RouterConfig(
    ListenConfig,
    ProcessConfig,
    ModelSettings,
    RegistryConfig,
    TelemetryConfig,
    InternalTlsConfig,
    ObjectiveConfig,
    LogConfig,
):
    """Settings of the router, which serves Baton's public endpoint over gRPC and HTTP."""

    port: int = field_of(ListenConfig, "port", default=50051)
    admin_host: str = Field("127.0.0.1", description="Address of the admin port.")
    admin_port: int = Field(50052, ge=0, le=65535, description="Admin port; 0: any free port.")
    share_ports: bool = Field(
        False,
        description="Share --port and --http-port with other routers of this user, each with --admin-port and "
        "--metrics-port of its own.",
    )
    workers: Workers = Field(
        (), description="Fixed list of workers, prefill@host:port,decode@host:port, instead of Redis."
    )
    reflection: bool = Field(True, description="Serve gRPC reflection, on the public port only without API keys.")
    api_keys: Path | None = Field(
        None, description="File with the hashes of the API keys (baton keys new); reloaded when it changes."
    )
    api_key_hashes: str = Field("", description="Further key hashes: NAME:SHA256,NAME:SHA256.")
    insecure: bool = Field(False, description="Allow ports without keys beyond loopback.")
    tls_cert: Path | None = Field(
        None, description="Certificate (PEM) of the public ports, which then accept TLS only."
    )
    tls_key: Path | None = Field(
        None, description="Private key (PEM) of --tls-cert; both are reloaded when they change."
    )
    tool_format: Literal[
        "auto", "harmony", "deepseek", "mistral", "pythonic", "glm", "qwen_coder", "hermes", "llama"
    ] = Field("auto", description="Format of the model's tool calls; auto: the one in its chat template.")
    known_prompts_mib: int = Field(
        256,
        ge=0,
        description="Memory for the tokens of known prompt prefixes, which are not tokenised again, in MiB; "
        "11 bytes per token.",
    )
    record_tokens_mib: int = Field(
        0,
        ge=0,
        description="Memory for token ids of the newest prompts and answers, for baton bundle --with-tokens, in MiB; "
        "0: none are kept.",
    )
    default_deadline_s: float = Field(
        600.0, gt=0, le=86_400, description="Default and maximum deadline of a request, in seconds."
    )
    ready_wait_s: float = Field(
        10.0, ge=0, le=600, description="Maximum wait of a request for the first worker, in seconds."
    )
    max_wait_s: float = Field(
        60.0, gt=0, le=86_400, description="Maximum time that a request may be pending, in seconds."
    )
    max_waiting: int = Field(1024, ge=1, description="Maximum number of pending requests.")
    max_waiting_per_tenant: int = Field(
        512, ge=1, description="Maximum number of pending requests per API key, or without a key."
    )
    placement: Strategy = Field(
        Strategy.CACHE_AWARE,
        description="Placement policy, by which workers are chosen for a request (docs/routing.md).",
    )
    no_prefill_worker: NoPrefillWorker = Field(
        NoPrefillWorker.LOCAL,
        description="Requests without a prefill worker: they stay pending, decode workers compute the "
        "prompts, or they are rejected.",
    )
    # Measured on two CPU cores: a decode worker computes up to 128 tokens faster than a prefill worker with the same
    # cached prefix, and other answers' token gaps do not grow. The default is half of 128, for safety.
    local_prefill_tokens: int = Field(
        64, ge=0, description="Maximum number of uncached prompt tokens that a decode worker computes itself."
    )
    attempts: int = Field(6, ge=1, le=100, description="Maximum number of consecutive failed attempts of a request.")
    max_active: int = Field(8192, ge=1, description="Maximum number of in-flight requests.")
    planner: Literal["off", "propose", "act"] = Field(
        "propose",
        description="Role planner. act: workers change roles with the load; propose: changes are only shown.",
    )
    stall_factor: float = Field(
        2.0, ge=1, description="Gap between tokens that counts as a stall, as a multiple of the request's median gap."
    )
    stall_min_ms: float = Field(20.0, ge=1, description="Shortest gap between tokens that counts as a stall.")
    planner_hold_s: float = Field(
        5.0, ge=0, le=3600, description="Time for which a role change must be worthwhile before it is made, in seconds."
    )
    planner_cool_down_s: float = Field(
        30.0, ge=0, le=86_400, description="Shortest time between two role changes, in seconds."
    )
    scale_down_s: float = Field(
        300.0,
        ge=0,
        le=86_400,
        description="Time for which fewer workers of a role must suffice before baton:desired_replicas falls, "
        "in seconds.",
    )
    worker_reconnect_s: float = Field(
        1.0,
        gt=0,
        le=60,
        former="session_grace_s",
        description="Time that a worker has to reconnect after its connection broke, in seconds.",
    )
    session_silence_s: float = Field(
        1.4, gt=0.3, le=60, description="Silence after which a connected worker counts as lost, in seconds."
    )

    http_host: str = Field("127.0.0.1", description="Address of the HTTP port.")
    http_port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0: any free port.")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Further HTTP port, of this router alone with --share-ports; 0: any free port.",
    )
    allowed_hosts: Hosts = Field(
        (),
        description="Allowed Host names without API keys, in addition to localhost and addresses: NAME,*.NAME or *.",
    )
    cors_origins: Origins = Field(
        (), description="Origins whose web pages may call the router: https://NAME,http://NAME:PORT or *."
    )
    http_max_connections: int = Field(
        2048, ge=1, description="Maximum number of HTTP connections with a request in progress."
    )
    http_max_body: ByteSize = Field(ByteSize(4 << 20), gt=0, description="Maximum size of an HTTP request body.")
    http_all_bodies: ByteSize = Field(
        ByteSize(256 << 20), gt=0, description="Maximum total size of request bodies being read."
    )
    http_head_s: float = Field(
        10.0, gt=0, le=600, description="Timeout for receiving a request line and its headers, in seconds."
    )
    http_body_s: float = Field(60.0, gt=0, le=3600, description="Timeout for receiving a body, in seconds.")
    http_idle_s: float = Field(
        75.0, gt=0, le=3600, description="Timeout of an idle connection between requests, in seconds."
    )
    http_stall_s: float = Field(
        30.0, gt=0, le=3600, description="Timeout of a client that reads nothing of its answer, in seconds."
    )
    responses_per_key: int = Field(
        1000, ge=0, description="Maximum number of stored responses per API key; 0: none are stored."
    )
    responses_key_bytes: ByteSize = Field(
        ByteSize(64 << 20), gt=0, description="Maximum size of the stored responses of one API key."
    )
    responses_all_bytes: ByteSize = Field(
        ByteSize(256 << 20), gt=0, description="Maximum size of all stored responses."
    )
    responses_ttl_s: float = Field(
        86_400.0, gt=0, le=2_592_000, description="Lifetime of a stored response, in seconds."
    )
    batch_dir: Path | None = Field(
        None,
        description="Folder of uploaded files and batches, which turns /v1/files and /v1/batches on; routers of one "
        "machine may share it.",
    )
    batch_lines: int = Field(32, ge=1, le=4096, description="Maximum number of in-flight requests of batches.")
    batch_file_bytes: ByteSize = Field(ByteSize(200 << 20), gt=0, description="Maximum size of an uploaded file.")
    batch_key_bytes: ByteSize = Field(
        ByteSize(2 << 30), gt=0, description="Maximum size of the files and batches of one API key."
    )
    batch_all_bytes: ByteSize = Field(ByteSize(16 << 30), gt=0, description="Maximum size of all files and batches.")
    batch_ttl_s: float = Field(
        2_592_000.0, gt=0, le=31_536_000, description="Default and maximum lifetime of a file, in seconds."
    )
    http_adapters: bool = Field(
        False,
        description="Serve vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter; with API keys, for admin "
        "keys only.",
    )

    @check
    def _membership(self) -> None:
        if not self.workers and self.redis_url is None:
            raise ValueError("set --redis-url (BATON_REDIS_URL) or --workers (BATON_WORKERS)")

    @check
    def _sharing(self) -> None:
        if self.share_ports and not (self.port and self.http_port):
            raise ValueError("--share-ports needs a --port and an --http-port other than 0")

    @check
    def _exposure(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key must be set together")
        try:
            self.open_keys()
        except (KeyFormatError, OSError) as error:
            raise ValueError(f"--api-keys, --api-key-hashes: {error}") from error
        risk = too_open(self.public_hosts, self.admin_host, self.has_keys)
        if risk and not self.insecure:
            raise ValueError(f"{risk}; use --api-keys, or --insecure to allow it")

    @property
    def listens_at(self) -> tuple[Address, ...]:
        admin = Address("--admin-port", self.admin_host, self.admin_port)
        http = Address("--http-port", self.http_host, self.http_port)
        metrics = Address("--metrics-port", self.http_host, self.metrics_port or 0)
        return (*super().listens_at, admin, http, metrics)

    @property
    def connects_to(self) -> tuple[Address, ...]:
        workers = (address_of_url("--workers", worker.endpoint) for worker in self.workers)
        return (*super().connects_to, *workers)

    @property
    def public_hosts(self) -> tuple[str, ...]:
        return (self.host, self.http_host)

    @property
    def has_keys(self) -> bool:
        return self.api_keys is not None or bool(self.api_key_hashes)

    @property
    def tls(self) -> "TlsFiles | None":
        from baton.process.security.tls import TlsFiles  # imported here because it imports gRPC

        return TlsFiles(self.tls_cert, self.tls_key) if self.tls_cert is not None and self.tls_key is not None else None

    def open_keys(self) -> KeyStore | None:
        """Return the key store; None without keys. Raises: KeyFormatError, OSError."""
        fixed: tuple[ApiKey, ...] = parse_key_hashes(self.api_key_hashes)
        return KeyStore(self.api_keys, fixed) if self.has_keys else None
