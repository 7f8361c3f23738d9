"""Configuration of a decode worker."""

from pathlib import Path
from typing import Literal

from baton.process.config import ByteSize, Field, ObjectiveConfig, check, field_of
from baton.text.model_options import DRAFT_KV_BYTES, SPECULATIVE_TOKENS
from baton.text.speculation import MOST_SPECULATIVE_TOKENS
from baton.worker.config import WorkerConfig


class DecodeConfig(WorkerConfig):
    """Settings of a worker that receives KV and generates tokens."""

    max_sequences: int = Field(
        64, ge=1, le=4096, description="Number of batch slots: maximum number of running sequences."
    )
    tbt_slo_ms: float = field_of(ObjectiveConfig, "tbt_slo_ms", former=None)
    strict_tbt: bool = Field(
        False, description="Let prompts lengthen a step by a tenth at most, whatever their TTFT objective."
    )
    speculate: Literal["off", "ngram", "draft"] = Field(
        "off",
        description="Speculative decoding. ngram: drafts repeat earlier tokens of prompt or answer; draft: "
        "drafts come from --draft-model. It changes no token; the number of drafts follows "
        "measured benefit.",
    )
    draft_model: Path | None = Field(
        None, description="Folder of a small model with the same vocabulary, for --speculate draft."
    )
    draft_kv_memory: ByteSize = Field(
        ByteSize(DRAFT_KV_BYTES), gt=0, description="Size of the KV pool of --draft-model, in addition to --kv-memory."
    )
    speculative_tokens: int = Field(
        SPECULATIVE_TOKENS,
        ge=1,
        le=MOST_SPECULATIVE_TOKENS,
        description="Maximum number of drafted tokens per sequence and step.",
    )
    swap_memory: ByteSize = Field(
        ByteSize(256 * 2**20),
        ge=0,
        description="Host memory for KV of preempted sequences, allocated at first use; 0: KV is recomputed.",
    )
    kept_answers: int = Field(
        1024,
        ge=0,
        description="Maximum number of finished answers retained for --session-grace-s, in case their router dies.",
    )
    kept_tokens: int = Field(1 << 18, ge=0, description="Maximum number of tokens of all retained answers.")
    step_file: Path | None = Field(None, description="File for the times of every step, one line each, for benchmarks.")

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
            raise ValueError("--speculate draft and --draft-model must be set together")
        if self.draft_model is not None and self.tensor_parallel > 1:
            raise ValueError("--draft-model needs --tensor-parallel 1, because it drafts on one rank")
