"""Configuration of a prefill worker."""

from pathlib import Path
from typing import Literal

from service.config import Cores, Field
from service.worker_config import WorkerConfig


class PrefillConfig(WorkerConfig):
    """Computes prompts and keeps their KV until a decode worker has taken it."""

    chunk_tokens: int = Field(512, ge=1, description="most prompt tokens computed in one step")
    tail_tokens: int = Field(
        64,
        ge=0,
        description="on a CPU, most tokens of a prompt's last step of several: an answer waits for their KV; 0: any",
    )
    lease_s: float = Field(5.0, gt=0, description="how long KV that nobody reads stays pinned")
    park_s: float = Field(10.0, gt=0, description="how long a reader may wait for a prompt that is not here yet")
    transfer_cores: Cores | None = Field(None, description="cores for copying KV, off the ones that compute")
    pair_timeout_s: float = Field(5.0, gt=0, description="longest wait for another worker to pair")
    fetch: Literal["auto", "always", "never"] = Field(
        "auto", description="whether KV that another worker has is fetched; auto: where that is sooner than computing"
    )
    fetch_timeout_s: float = Field(1.0, gt=0, description="longest wait for a fetch before the prompt is computed")
    decode_slow_down: float = Field(
        1.5, ge=1, description="how many times as long steps of a decode worker on the same GPU may take, about"
    )
    spare_cores: Cores | None = Field(
        None, description="CPU cores of another worker, used while the --core-use file of that one says it may be"
    )
    spare_core_use: Path | None = Field(None, description="that file")
    nice: int = Field(0, ge=0, le=19, description="how far computing stands back behind whatever shares its cores")
    chunk_file: Path | None = Field(None, description="file for the times of every step, a line each, for benchmarks")
