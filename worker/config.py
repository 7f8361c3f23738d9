"""Configuration of a worker: of prefill, of decode, and of one that can change between the two."""

from pathlib import Path
from typing import Literal

from baton.generation.speculation import MOST_SPECULATIVE_TOKENS
from baton.service.config import ByteSize, Cores, Field, check
from baton.service.registry.worker_record import WorkerRole
from baton.service.worker_config import WorkerConfig


class PrefillConfig(WorkerConfig):
    """Computes prompts and keeps their KV until a decode worker has taken it."""

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


class DecodeConfig(WorkerConfig):
    """Takes over KV and generates tokens for all its sequences at once."""

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

    @check
    def _draft_model_is_used(self) -> None:
        if (self.speculate == "draft") != (self.draft_model is not None):
            raise ValueError("--speculate draft and --draft-model go together")
        if self.draft_model is not None and self.tensor_parallel > 1:
            raise ValueError("--draft-model needs --tensor-parallel 1: it drafts on one rank")


class ElasticConfig(PrefillConfig, DecodeConfig):
    """Serves as a prefill or a decode worker, and changes when a router says so."""

    role: WorkerRole = Field(description="first role: prefill or decode")
    role_drain_s: float = Field(
        60.0, gt=0, le=3600, description="longest drain before a change of role; after it, the worker keeps its role"
    )
