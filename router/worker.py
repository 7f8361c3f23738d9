"""A worker as the router knows it: what it said of itself, and its newest report. Plain values, no protobuf."""

from dataclasses import dataclass

from service.worker_record import WorkerRole

__all__ = ["ModelDescription", "PageCounts", "WorkerDescription", "WorkerReport", "WorkerRole"]


@dataclass(frozen=True, slots=True)
class ModelDescription:
    name: str
    path: str  # folder of the checkpoint, as the worker sees it
    max_model_len: int  # prompt plus answer, in tokens
    vocab_size: int
    dtype: str  # "float32" or "bfloat16"
    block_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """What a worker says when a session begins; it holds for the whole epoch."""

    worker_id: str
    role: WorkerRole
    pid: int
    fingerprint: bytes
    model: ModelDescription
    total_blocks: int
    total_slots: int  # 0 for a prefill worker


@dataclass(frozen=True, slots=True)
class PageCounts:
    """In blocks; free + cached + held = total."""

    total: int
    free: int
    cached: int
    held: int
    held_by_sequences: int
    held_by_transfers: int


@dataclass(frozen=True, slots=True)
class WorkerReport:
    limit_blocks: int  # most that this router may have committed there at once, in the worst case
    limit_slots: int
    pages: PageCounts
    waiting_requests: int
    running_sequences: int
    pending_tokens: int
    draining: bool
    steps: int
