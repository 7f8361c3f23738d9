"""Configuration of a router that speaks HTTP too."""

import re
from typing import Annotated
from urllib.parse import urlsplit

from baton.process.config import ByteSize, Field, Reader
from baton.process.serving.addresses import Address
from baton.router.config import RouterConfig

_HOST = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


def parse_hosts(text: str) -> tuple[str, ...]:
    """Names with commas between them. Raises: ValueError."""
    hosts = _listed(text)
    for host in hosts:
        if _HOST.fullmatch(host) is None:
            raise ValueError(f"{host!r} is not a host name: NAME, *.NAME or *, without scheme and port")
    return hosts


def parse_origins(text: str) -> tuple[str, ...]:
    """Origins with commas between them, as browsers write them. Raises: ValueError."""
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


class GatewayConfig(RouterConfig):
    """The public endpoint of Baton: gRPC, and OpenAI's HTTP API on a port of its own."""

    http_host: str = Field("127.0.0.1", description="address of the HTTP port")
    http_port: int = Field(8000, ge=0, le=65535, description="HTTP port, 0 takes a free one")
    allowed_hosts: Hosts = Field(
        (),
        description="names that Host may have without API keys, besides localhost and addresses: NAME,*.NAME or *",
    )
    cors_origins: Origins = Field(
        (), description="origins whose web pages may call the router: https://NAME,http://NAME:PORT or *"
    )
    http_max_connections: int = Field(2048, ge=1, description="most HTTP connections with a request at once")
    http_max_body: ByteSize = Field(ByteSize(4 << 20), gt=0, description="largest HTTP request body")
    http_all_bodies: ByteSize = Field(ByteSize(256 << 20), gt=0, description="most bytes of bodies being read at once")
    http_head_s: float = Field(10.0, gt=0, le=600, description="how long a request line with its headers may take")
    http_body_s: float = Field(60.0, gt=0, le=3600, description="how long a body may take to arrive")
    http_idle_s: float = Field(75.0, gt=0, le=3600, description="how long a connection may be idle between requests")
    http_stall_s: float = Field(30.0, gt=0, le=3600, description="how long a client may read nothing of its answer")
    responses_per_key: int = Field(1000, ge=0, description="most responses kept of an API key, 0 keeps none")
    responses_key_bytes: ByteSize = Field(ByteSize(64 << 20), gt=0, description="most bytes of responses of a key")
    responses_all_bytes: ByteSize = Field(ByteSize(256 << 20), gt=0, description="most bytes of responses of all keys")
    responses_ttl_s: float = Field(86_400.0, gt=0, le=2_592_000, description="how long a response is kept")

    http_adapters: bool = Field(
        False,
        description="serve vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter; with API keys, to an admin key",
    )

    @property
    def listens_at(self) -> tuple[Address, ...]:
        return (*super().listens_at, Address("--http-port", self.http_host, self.http_port))

    @property
    def public_hosts(self) -> tuple[str, ...]:
        return (self.host, self.http_host)
