"""The operator's view of one request: where its time went, and what became of its prompt's blocks."""

from dataclasses import dataclass

from baton.client.cluster import RequestDrafts, RequestExplanation, RequestStages, RequestStall


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks of a prompt side by side that have one fate.

    `fate`: cached, expected, fetched, loaded, gone, evicted, elsewhere, other_salt, never, unknown or unused, as
    protos/admin.proto describes them.
    """

    first_block: int
    blocks: int
    fate: str
    worker_id: str  # of another worker that had them; empty where there was none
    least_age_s: float  # between their eviction and the placement: of the last one evicted
    most_age_s: float  # of the first


@dataclass(frozen=True, slots=True)
class CacheAutopsy:
    """Of the worker that was to compute the prompt."""

    worker_id: str
    attempt: int  # counted from 1
    block_tokens: int
    runs: tuple[BlockRun, ...]
    known_s: float  # all evictions there of so long before the placement are known
    expected_blocks: int  # to be found there, by the placement


@dataclass(frozen=True, slots=True)
class ColocatedPrefill:
    """The prediction had the decode worker computed the prompt itself."""

    worker_id: str
    is_local: bool  # it did
    basis: str  # measured, assumed, or empty: no time is predicted
    ttft_ms: float  # from the dispatch
    wait_ms: float  # of that, for other prompts
    measured_ttft_ms: float  # what came instead, or of it; 0 where no first token came
    prompt_tokens: int  # that it did not have
    answers: int  # that ran there
    answers_gap_ms: float  # expected between their tokens
    checked_requests: int  # whose prompts decode workers did compute, of a length like this one's if there were any
    median_error: float  # of those, over the measured time
    median_ratio: float  # of those, measured over predicted
    checked_tokens: int  # of those, the median of prompt_tokens


@dataclass(frozen=True, slots=True)
class RequestWhy:
    placed: RequestExplanation
    stages: RequestStages
    stalls: tuple[RequestStall, ...]  # the longest
    stall_count: int
    longest_gap_ms: float
    cache: CacheAutopsy | None
    colocated: ColocatedPrefill | None
    drafts: RequestDrafts | None = None  # None: none of its steps had any
