"""Configuration of a prefill worker."""

from pathlib import Path
from typing import Literal

from baton.process.config import Cores, Field
from baton.worker.config import WorkerConfig


class PrefillConfig(WorkerConfig):
    """Settings of a worker that computes prompts and keeps their KV until a decode worker has read it."""

    tail_tokens: int = Field(
        64,
        ge=0,
        description="Maximum number of tokens in the last chunk of a prompt on a CPU, whose KV delays the "
        "answer; 0: no limit.",
    )
    park_s: float = Field(
        10.0, gt=0, description="Time that a reader may wait for a prompt that has not arrived, in seconds."
    )
    fetch: Literal["auto", "always", "never"] = Field(
        "auto", description="Fetch KV that another worker has; auto: if that is faster than computing it."
    )
    fetch_timeout_s: float = Field(
        1.0, gt=0, description="Timeout of a fetch, in seconds; the prompt is computed after it."
    )
    decode_slow_down: float = Field(
        1.5, ge=1, description="Approximate maximum slow-down of a decode worker's steps on the same GPU, as a factor."
    )
    spare_cores: Cores | None = Field(
        None, description="CPU cores of another worker, used while its --core-use file says that they are idle."
    )
    spare_core_use: Path | None = Field(None, description="The --core-use file of the worker that owns --spare-cores.")
    nice: int = Field(0, ge=0, le=19, description="Nice value of the threads that compute.")
    chunk_file: Path | None = Field(
        None, description="File for the times of every step, one line each, for benchmarks."
    )
