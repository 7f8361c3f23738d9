"""Configuration of a decode worker."""

from pathlib import Path
from typing import Literal

from baton.process.config import ByteSize, Field, check
from baton.process.worker_config import WorkerConfig
from baton.text.speculation import MOST_SPECULATIVE_TOKENS


class DecodeConfig(WorkerConfig):
    """Settings of a worker that receives KV and generates tokens."""

    max_sequences: int = Field(64, ge=1, le=4096, description="batch slots: most sequences at once")
    tbt_slo_ms: float | None = Field(
        None,
        gt=0,
        description="longest step with prompts in it; none: prompts make a step at most a tenth longer. Higher "
        "values give earlier first tokens and more throughput, lower ones smoother answers",
    )
    speculate: Literal["off", "ngram", "draft"] = Field(
        "off",
        description="speculative decoding computes tokens beside the newest one. ngram: those that followed the same "
        "ones earlier in prompt or answer; draft: those that --draft-model drafts. It changes no token; how many is "
        "measured, none where it does not pay",
    )
    draft_model: Path | None = Field(
        None, description="folder of a small model of the same vocabulary, for --speculate draft"
    )
    draft_kv_memory: ByteSize = Field(
        ByteSize(128 * 2**20), gt=0, description="size of the KV pool of --draft-model, beside --kv-memory"
    )
    speculative_tokens: int = Field(
        8, ge=1, le=MOST_SPECULATIVE_TOKENS, description="most tokens that --speculate computes so in a step"
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
    step_file: Path | None = Field(None, description="file for the times of every step, one line each, for benchmarks")

    @property
    def speculates(self) -> bool:
        return self.speculate != "off"

    @property
    def draft(self) -> tuple[Path, int] | None:
        return None if self.draft_model is None else (self.draft_model, int(self.draft_kv_memory))

    @property
    def swap_bytes(self) -> int:
        return int(self.swap_memory)

    @check
    def _draft_model_is_used(self) -> None:
        if (self.speculate == "draft") != (self.draft_model is not None):
            raise ValueError("--speculate draft and --draft-model go together")
        if self.draft_model is not None and self.tensor_parallel > 1:
            raise ValueError("--draft-model needs --tensor-parallel 1: it drafts on one rank")
