"""Configuration of a decode worker."""

from pathlib import Path

from baton.service.config import ByteSize, Field
from baton.service.worker_config import WorkerConfig


class DecodeConfig(WorkerConfig):
    """Takes over KV and generates tokens for all its sequences at once."""

    max_sequences: int = Field(64, ge=1, le=4096, description="batch slots: most sequences at once")
    chunk_tokens: int = Field(512, ge=1, description="most tokens of one step, unless more sequences than that run")
    tbt_slo_ms: float | None = Field(
        None,
        gt=0,
        description="longest step with prompts in it; none: prompts make a step at most a tenth longer. Higher "
        "values give earlier first tokens and more throughput, lower ones smoother answers",
    )
    swap_memory: ByteSize = Field(
        ByteSize(256 * 2**20),
        ge=0,
        description="host memory for KV of preempted sequences, allocated when first needed; 0: it is recomputed",
    )
    kept_answers: int = Field(
        1024, ge=0, description="most finished answers retained for --session-grace-s, in case their router dies"
    )
    kept_tokens: int = Field(1 << 18, ge=0, description="most tokens of all finished answers that are retained")
    lease_s: float = Field(5.0, gt=0, description="how long a fetch of cached blocks may be silent before it is ended")
    step_file: Path | None = Field(None, description="file for the times of every step, one line each, for benchmarks")
