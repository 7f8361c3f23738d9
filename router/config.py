"""Configuration of the router."""

from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from router.exposure import too_open
from service.api_keys import ApiKey, KeyFormatError, parse_key_hashes
from service.config import (
    Cores,
    Field,
    InternalTlsConfig,
    ListenConfig,
    LogConfig,
    RegistryConfig,
    TelemetryConfig,
    Workers,
)
from service.key_store import KeyStore
from service.tls import TlsFiles


class RouterConfig(ListenConfig, RegistryConfig, TelemetryConfig, InternalTlsConfig, LogConfig):
    """The public endpoint of Baton."""

    port: int = Field(50051, ge=0, le=65535, description="public port, 0 takes a free one")
    admin_host: str = Field("127.0.0.1", description="address of the operator's port")
    admin_port: int = Field(50052, ge=0, le=65535, description="operator's port, 0 takes a free one")
    workers: Workers = Field((), description="workers by hand, prefill@host:port,decode@host:port, instead of Redis")
    model: Path | None = Field(None, description="folder with the tokenizer, if not where the workers say")
    model_name: str | None = Field(None, description="name of the model, if not as the workers say")
    cores: Cores | None = Field(None, description="CPU cores to stay on, for example 0,2-3")
    reflection: bool = Field(True, description="answer gRPC reflection; on the public port only without API keys")
    api_keys: Path | None = Field(
        None, description="file of the API keys that are good, hashed (baton keys new); read again when it changes"
    )
    api_key_hashes: str = Field("", description="keys beside those of the file: NAME:SHA256,NAME:SHA256")
    insecure: bool = Field(False, description="allow ports without keys beyond loopback")
    tls_cert: Path | None = Field(None, description="certificate of the public ports, PEM; with it they speak TLS only")
    tls_key: Path | None = Field(None, description="its key, PEM; both are read again when they change")
    default_deadline_s: float = Field(600.0, gt=0, le=86_400, description="for requests without a deadline; the most")
    ready_wait_s: float = Field(10.0, ge=0, le=600, description="how long a request waits for workers")
    max_wait_s: float = Field(60.0, gt=0, le=86_400, description="how long a request waits for room")
    max_waiting: int = Field(1024, ge=1, description="most requests that wait for room")
    max_waiting_per_tenant: int = Field(512, ge=1, description="most of them with the same API key, or with none")
    placement: Literal["cache_aware", "prefix_hash", "least_tokens", "round_robin"] = Field(
        "cache_aware", description="how workers are chosen for a request"
    )
    no_prefill_worker: Literal["queue", "local", "reject"] = Field(
        "local", description="a prompt without a prefill worker: wait, let the decode worker compute it, refuse"
    )
    # Measured on two CPU cores, with and without a stream beside: up to 128 tokens sooner than over a prefill worker
    # that has the same prefix, no longer gap between the tokens of that stream. Half, as steps are everyone's.
    local_prefill_tokens: int = Field(
        64, ge=0, description="a decode worker with the rest of a prompt in its cache computes so many tokens itself"
    )
    attempts: int = Field(6, ge=1, le=100, description="how often an answer may fail to go on before its request does")
    max_active: int = Field(8192, ge=1, description="most requests at once")
    planner: Literal["off", "propose", "act"] = Field(
        "propose", description="what a planner does about roles that workers had better change"
    )
    ttft_slo_ms: float = Field(2000.0, gt=0, description="time to the first token that the planner keeps to")
    tbt_slo_ms: float = Field(100.0, gt=0, description="time between tokens that the planner keeps to")
    planner_hold_s: float = Field(5.0, ge=0, le=3600, description="how long a change must seem worth it to the planner")
    planner_cool_down_s: float = Field(30.0, ge=0, le=86_400, description="least time between changes of the planner")
    session_grace_s: float = Field(1.0, gt=0, le=60, description="how long a broken session may take to come back")
    session_silence_s: float = Field(1.2, gt=0.3, le=60, description="how long a connected worker may be silent")
    drain_s: float = Field(30.0, ge=0, le=3600, description="how long a drain may take")

    @model_validator(mode="after")
    def _membership(self) -> Self:
        if not self.workers and self.redis_url is None:
            raise ValueError("give --redis-url (BATON_REDIS_URL) or --workers (BATON_WORKERS)")
        return self

    @model_validator(mode="after")
    def _exposure(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together")
        try:
            self.open_keys()
        except (KeyFormatError, OSError) as error:
            raise ValueError(f"--api-keys, --api-key-hashes: {error}") from error
        risk = too_open(self.public_hosts, self.admin_host, self.has_keys)
        if risk and not self.insecure:
            raise ValueError(f"{risk}; give --api-keys, or --insecure where that is meant")
        return self

    @property
    def public_hosts(self) -> tuple[str, ...]:
        return (self.host,)

    @property
    def has_keys(self) -> bool:
        return self.api_keys is not None or bool(self.api_key_hashes)

    @property
    def tls(self) -> TlsFiles | None:
        return TlsFiles(self.tls_cert, self.tls_key) if self.tls_cert is not None and self.tls_key is not None else None

    def open_keys(self) -> KeyStore | None:
        """None without keys. Raises: KeyFormatError, OSError."""
        fixed: tuple[ApiKey, ...] = parse_key_hashes(self.api_key_hashes)
        return KeyStore(self.api_keys, fixed) if self.has_keys else None
