"""Configuration of a decode worker."""

from typing import Literal

from service.config import Cores, Field
from service.worker_config import WorkerConfig


class DecodeConfig(WorkerConfig):
    """Takes over KV and generates tokens for all its sequences at once."""

    max_sequences: int = Field(64, ge=1, le=4096, description="most sequences in the running batch")
    transfer_cores: Cores | None = Field(None, description="cores for copying KV, off the ones that decode")
    pair_timeout_s: float = Field(5.0, gt=0, description="longest wait for a prefill worker to pair")
    transport: Literal["auto", "shared_memory", "grpc"] = Field("auto", description="how KV comes; auto: the fastest")
