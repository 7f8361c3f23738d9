"""Configuration of a prefill worker."""

from pathlib import Path
from typing import Literal

from baton.process.config import Cores, Field
from baton.process.worker_config import WorkerConfig


class PrefillConfig(WorkerConfig):
    """Settings of a worker that computes prompts and keeps their KV until a decode worker has read it."""

    tail_tokens: int = Field(
        64,
        ge=0,
        description="on a CPU, most tokens of the last chunk of a prompt, whose KV delays the answer; 0: no limit",
    )
    park_s: float = Field(10.0, gt=0, description="how long a reader may wait for a prompt that has not arrived")
    fetch: Literal["auto", "always", "never"] = Field(
        "auto", description="whether to fetch KV that another worker has; auto: if that is faster than computing it"
    )
    fetch_timeout_s: float = Field(1.0, gt=0, description="longest wait for a fetch before the prompt is computed")
    decode_slow_down: float = Field(
        1.5, ge=1, description="about how many times longer steps of a decode worker on the same GPU may become"
    )
    spare_cores: Cores | None = Field(
        None, description="CPU cores of another worker, used while its --core-use file says that they are idle"
    )
    spare_core_use: Path | None = Field(None, description="that file")
    nice: int = Field(0, ge=0, le=19, description="nice value of the threads that compute")
    chunk_file: Path | None = Field(None, description="file for the times of every step, one line each, for benchmarks")
