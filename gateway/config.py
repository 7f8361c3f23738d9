"""Configuration of a router that speaks HTTP too."""

from baton.router.config import RouterConfig
from baton.service.config import ByteSize, Field
from baton.service.serving.addresses import Address


class GatewayConfig(RouterConfig):
    """The public endpoint of Baton: gRPC, and OpenAI's HTTP API on a port of its own."""

    http_host: str = Field("127.0.0.1", description="address of the HTTP port")
    http_port: int = Field(8000, ge=0, le=65535, description="HTTP port, 0 takes a free one")
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
