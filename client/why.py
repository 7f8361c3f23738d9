"""Report on one request: where its time went, and what became of its prompt's blocks."""

from dataclasses import dataclass

from baton.client.cluster import RequestDrafts, RequestExplanation, RequestStages, RequestStall


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of a prompt with the same fate.

    `fate`: cached, expected, fetched, loaded, gone, evicted, elsewhere, other_salt, never, unknown or unused, as
    defined in protos/admin.proto.
    """

    first_block: int
    blocks: int
    fate: str
    worker_id: str  # another worker that had the blocks; empty without one
    least_age_s: float  # from the last eviction among these blocks to the placement
    most_age_s: float  # from the first eviction among these blocks to the placement


@dataclass(frozen=True, slots=True)
class CacheAutopsy:
    """Prompt blocks on the worker chosen to compute the prompt."""

    worker_id: str
    attempt: int  # number of the attempt, counted from 1
    block_tokens: int
    runs: tuple[BlockRun, ...]
    known_s: float  # seconds before the placement during which all evictions are known
    expected_blocks: int  # cached blocks predicted by the placement


@dataclass(frozen=True, slots=True)
class ColocatedPrefill:
    """Predicted latency if the decode worker computes the prompt itself."""

    worker_id: str
    is_local: bool  # true if the decode worker computed the prompt
    basis: str  # measured, assumed, or empty without a prediction
    ttft_ms: float  # predicted time from dispatch to the first token
    wait_ms: float  # part of ttft_ms spent waiting for other prompts
    measured_ttft_ms: float  # actual time from dispatch to the first token; 0 without a first token
    prompt_tokens: int  # prompt tokens not cached on the worker
    answers: int  # sequences running on the worker
    answers_gap_ms: float  # expected time between tokens of these sequences
    checked_requests: int  # number of colocated requests, if possible of similar length, that check the prediction
    median_error: float  # error of the checked predictions, relative to the measured time
    median_ratio: float  # median of measured over predicted time of the checked requests
    checked_tokens: int  # median prompt_tokens of the checked requests


@dataclass(frozen=True, slots=True)
class PromptChange:
    """First token at which a prompt no longer repeats that of the session's last turn, and text from there on."""

    token: int
    text: str


@dataclass(frozen=True, slots=True)
class RequestWhy:
    placed: RequestExplanation
    stages: RequestStages
    stalls: tuple[RequestStall, ...]  # longest stalls
    stall_count: int
    longest_gap_ms: float
    cache: CacheAutopsy | None
    colocated: ColocatedPrefill | None
    drafts: RequestDrafts | None = None  # None without drafts
    not_acted_upon: tuple[str, ...] = ()  # fields, headers and tools of the call that were accepted without effect
    prompt_change: PromptChange | None = None  # None: no session, its first prompt, or it repeats the last turn
