"""Configuration of a prefill worker."""

from typing import Literal

from service.config import Field
from service.worker_config import WorkerConfig


class PrefillConfig(WorkerConfig):
    """Computes prompts and keeps their KV until a decode worker has taken it."""

    chunk_tokens: int = Field(512, ge=1, description="most prompt tokens computed in one step")
    lease_s: float = Field(5.0, gt=0, description="how long KV that nobody reads stays pinned")
    park_s: float = Field(10.0, gt=0, description="how long a reader may wait for a prompt that is not here yet")
    transport: Literal["auto", "shared_memory", "grpc"] = Field(
        "auto", description="how KV may leave: grpc keeps the pool private"
    )
