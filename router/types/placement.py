"""Inputs of a placement decision: the request, and the state of the workers. Plain values."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from baton.process.registry.worker_record import WorkerRole
from baton.router.types.request import PreparedRequest
from baton.router.types.worker import Adapter
from baton.text.block_groups import CHARGED_ANSWER_TOKENS, ONE_GROUP, BlockGroups, charged_blocks


class Measured(Enum):
    """Where a rate was measured."""

    NOWHERE = auto()  # not measured: the rate is the default value
    ELSEWHERE = auto()  # measured on other workers only
    HERE = auto()


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """Rates of a worker. The defaults apply until some worker has been measured."""

    prefill_tokens_per_s: float = 10_000.0  # prompt rate while no answers run
    beside_tokens_per_s: float | None = None  # a decode worker's prompt rate while answers run; None: unknown
    token_gap_ms: float = 20.0  # time between tokens of a single answer
    token_gap_ms_per_token: float = 5e-5  # increase of token_gap_ms for each token in flight on the worker
    kv_bytes_per_token: float = 100_000.0
    link_gb_per_s: float = 10.0  # rate of reading KV from a worker that links_gb_per_s lacks
    links_gb_per_s: Mapping[str, float] = field(default_factory=dict)  # rate of reading KV, by source endpoint
    prefill_measured: Measured = field(default=Measured.NOWHERE, compare=False)  # source of prefill_tokens_per_s


UNMEASURED = WorkerRates()


@dataclass(slots=True)  # not frozen: constructing a frozen one takes three times as long, per worker and decision
class WorkerView:
    """State of a worker for one placement decision. `limit_*`: this router's credit; `used_*`: used credit;
    `elsewhere_*`: load that other routers reported.
    """

    endpoint: str
    role: WorkerRole
    fingerprint: bytes
    total_blocks: int
    total_slots: int
    limit_blocks: int
    limit_slots: int
    used_blocks: int = 0
    used_slots: int = 0
    tokens_in_flight: int = 0  # tokens of requests of all routers
    hit_blocks: int = 0  # number of the request's blocks that are cached or that a prompt in flight will cache
    adapters: tuple[Adapter, ...] = ()
    ready_blocks: int = 0  # number of hit_blocks that are cached now, and that another worker could fetch
    elsewhere_slots: int = 0
    pending_prompt_tokens: int = 0  # prompt tokens that a decode worker must still compute
    recent_tokens: float = 0.0  # decaying sum of the uncached prompt tokens assigned to the worker
    rates: WorkerRates = UNMEASURED
    branches: int = 0  # number of earlier prompts that diverged after the cached prefix
    tier_blocks: int = 0  # number of the request's blocks after hit_blocks that the worker can load from files
    tier_block_bytes: int = 0  # size of a block in files
    load_bytes_per_s: float = 0.0  # measured rate of loading files; 0: unknown
    loading_ms: float = 0.0  # loading time of earlier prompts
    protocol: int = 1  # newest protocol version that the worker knows
    has_own_weights: bool = True  # False: the weights that it was started with were replaced


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """Properties of an attempt on which its placement depends."""

    fingerprint: bytes
    block_tokens: int
    prompt_tokens: int
    max_tokens: int  # maximum number of generated tokens per choice
    choices: int
    turn: int = 0  # number of the request, by which workers of equal cost take turns
    avoided_prefill: frozenset[str] = frozenset()  # endpoints that failed this request: used only if there is no other
    broken_pairs: frozenset[tuple[str, str]] = frozenset()
    """Suspended pairs (prefill endpoint, decode endpoint), which are used only if there is no other pair."""
    preferred_decode: str | None = None  # decode worker of the last attempt, if another worker failed
    adapter: Adapter | None = None
    prefix: bytes = b""  # hash of an early block, equal for prompts with the same beginning; empty: too short
    session: str | None = None  # name of a session whose requests prefer the same workers
    pooled: bool = False  # the request asks for a vector, not for an answer
    groups: BlockGroups = ONE_GROUP
    first_token_in_ms: float = math.inf
    """Time that is left for the first token when the attempt is submitted; negative: time by which it is late."""
    tbt_slo_ms: float = math.inf  # TBT objective

    charged_answer_tokens: int = field(init=False, repr=False, compare=False)
    """Charged answer length per choice, in tokens."""
    charged_blocks: int = field(init=False, repr=False, compare=False)
    """Charged blocks: complete prompt blocks once, plus each choice's blocks of an answer of the charged length."""
    longest_blocks: int = field(init=False, repr=False, compare=False)
    """Blocks of the longest possible choice, which a worker's pool must be able to hold."""
    reusable_blocks: int = field(init=False, repr=False, compare=False)
    """Maximum number of cached blocks that can be used. The last prompt token must be computed, to get its logits."""

    def __post_init__(self) -> None:
        """Compute the derived counts once, because a pending request goes through many decisions."""
        write, prompt_tokens, block_tokens = object.__setattr__, self.prompt_tokens, self.block_tokens
        charge = (prompt_tokens, self.max_tokens, self.choices, block_tokens, self.groups)
        write(self, "charged_answer_tokens", min(self.max_tokens, CHARGED_ANSWER_TOKENS))
        write(self, "charged_blocks", charged_blocks(*charge))
        write(self, "longest_blocks", self.groups.most_blocks(-(-(prompt_tokens + self.max_tokens) // block_tokens)))
        write(self, "reusable_blocks", (prompt_tokens - 1) // block_tokens)

    def after(self, waited_s: float) -> "PlacementRequest":
        """Return the request with as much less time for its first token."""
        if self.first_token_in_ms == math.inf:
            return self
        return replace(self, first_token_in_ms=self.first_token_in_ms - 1e3 * waited_s)

    def charged_on(self, worker: WorkerView) -> int:
        """Return the blocks of credit that the request needs on a worker: at most as many as the worker has."""
        return min(self.charged_blocks, worker.total_blocks)

    def hit_tokens(self, worker: WorkerView) -> int:
        return self.block_tokens * min(worker.hit_blocks, self.reusable_blocks)

    def ready_tokens(self, worker: WorkerView) -> int:
        return self.block_tokens * min(worker.ready_blocks, self.reusable_blocks)


PREFIX_TOKENS = 1024


def early_block(block_hashes: Sequence[bytes], block_tokens: int) -> bytes:
    """Return the hash of the last block within PREFIX_TOKENS, which identifies a prompt's beginning; empty if none."""
    last = min(max(PREFIX_TOKENS // block_tokens, 1), len(block_hashes))
    return block_hashes[last - 1] if last else b""


def placement_request(
    request: PreparedRequest,
    attempt_id: int,
    avoided_prefill: frozenset[str] = frozenset(),
    broken_pairs: frozenset[tuple[str, str]] = frozenset(),
    preferred_decode: str | None = None,
    first_token_in_ms: float = math.inf,
) -> PlacementRequest:
    """Return the properties of one attempt on which its placement depends."""
    pooled = request.pooling is not None
    return PlacementRequest(
        fingerprint=request.fingerprint,
        block_tokens=request.block_tokens,
        groups=request.groups,
        prompt_tokens=len(request.token_ids),
        max_tokens=0 if pooled else request.sampling.max_tokens - request.answered_tokens,
        choices=0 if pooled else request.sampling.places,
        turn=attempt_id,
        avoided_prefill=avoided_prefill,
        broken_pairs=broken_pairs,
        preferred_decode=preferred_decode,
        adapter=request.adapter,
        prefix=early_block(request.block_hashes, request.block_tokens),
        session=request.session or None,
        pooled=pooled,
        first_token_in_ms=first_token_in_ms,
        tbt_slo_ms=request.objectives.tbt_ms,
    )
