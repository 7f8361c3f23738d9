"""The inputs of a placement: a request, and the workers at one moment. Plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.process.registry.worker_record import WorkerRole
from baton.router.types.request import PreparedRequest
from baton.router.types.worker import Adapter
from baton.text.block_groups import CHARGED_ANSWER_TOKENS, ONE_GROUP, BlockGroups, charged_blocks


class Measured(Enum):
    """Source of a rate."""

    NOWHERE = auto()  # it is the default
    ELSEWHERE = auto()  # on other workers
    HERE = auto()


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """Rates of a worker. The defaults stand for rates that were never measured on any worker."""

    prefill_tokens_per_s: float = 10_000.0  # of prompts, with nothing beside them
    beside_tokens_per_s: float | None = None  # of a decode worker's prompts beside answers; None: not known
    token_gap_ms: float = 20.0  # between two tokens of an answer, with nothing else on the worker
    token_gap_ms_per_token: float = 5e-5  # more for each token in flight there
    kv_bytes_per_token: float = 100_000.0
    link_gb_per_s: float = 10.0  # where the one to a certain worker is not known
    links_gb_per_s: Mapping[str, float] = field(default_factory=dict)  # by the endpoint that is read from
    prefill_measured: Measured = field(default=Measured.NOWHERE, compare=False)  # of prefill_tokens_per_s


UNMEASURED = WorkerRates()


@dataclass(slots=True)  # not frozen: one is made per worker and decision, and that would take three times as long
class WorkerView:
    """Worker at one moment. `limit_*` are this router's credits and `used_*` what it has used of them; `elsewhere_*` is
    the load of other routers there, as far as they have reported it.
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
    tokens_in_flight: int = 0  # of all routers
    hit_blocks: int = 0  # of the request to be placed
    adapters: tuple[Adapter, ...] = ()
    ready_blocks: int = 0  # of those, the ones that another worker could fetch from there now
    elsewhere_slots: int = 0
    elsewhere_blocks: int = 0
    pending_prompt_tokens: int = 0  # of a decode worker: tokens of prompts that it still has to compute
    recent_tokens: float = 0.0  # of prompts, computed there lately: its share of the cluster's newest work
    rates: WorkerRates = UNMEASURED
    branches: int = 0  # how many prompts before this one diverged behind its part that is found there
    tier_blocks: int = 0  # of the request, behind `hit_blocks`: in files that it loads
    tier_block_bytes: int = 0  # size of one of those
    load_bytes_per_s: float = 0.0  # of such files, as it measured; 0: not known
    loading_ms: float = 0.0  # that prompts which were sent there load before this one
    protocol: int = 1  # the newest that it speaks
    has_own_weights: bool = True  # that it was started with


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """Properties of a request that a placement depends on."""

    fingerprint: bytes
    block_tokens: int
    prompt_tokens: int
    max_tokens: int  # per choice
    choices: int
    turn: int = 0  # counts requests: equal workers take turns
    avoided_prefill: frozenset[str] = frozenset()  # endpoints that failed this request; taken only if there is no other
    broken_pairs: frozenset[tuple[str, str]] = frozenset()
    """(prefill, decode) whose transfers fail: used together only where there is no other pair."""
    preferred_decode: str | None = None  # had this request before, and did not fail it
    adapter: Adapter | None = None
    prefix: bytes = b""  # hash of an early block, equal for prompts that begin alike; empty where there is none
    session: str | None = None  # requests of one session go to the same workers, unless those are overloaded
    pooled: bool = False  # it is computed for a vector, by one worker
    groups: BlockGroups = ONE_GROUP

    charged_answer_tokens: int = field(init=False, repr=False, compare=False)
    """Per choice."""
    charged_blocks: int = field(init=False, repr=False, compare=False)
    """Complete prompt blocks once, and for every choice the blocks that an answer of the charged length adds."""
    longest_blocks: int = field(init=False, repr=False, compare=False)
    """Blocks of one choice at its longest: a pool must have at least that many."""
    reusable_blocks: int = field(init=False, repr=False, compare=False)
    """A hit ends before the block that holds the last prompt token, whose logits are needed."""

    def __post_init__(self) -> None:
        """Compute these once: every decision needs them, and a pending request is decided upon many times."""
        write, prompt_tokens, block_tokens = object.__setattr__, self.prompt_tokens, self.block_tokens
        charge = (prompt_tokens, self.max_tokens, self.choices, block_tokens, self.groups)
        write(self, "charged_answer_tokens", min(self.max_tokens, CHARGED_ANSWER_TOKENS))
        write(self, "charged_blocks", charged_blocks(*charge))
        write(self, "longest_blocks", self.groups.blocks(-(-(prompt_tokens + self.max_tokens) // block_tokens)))
        write(self, "reusable_blocks", (prompt_tokens - 1) // block_tokens)

    def charged_on(self, worker: WorkerView) -> int:
        """Blocks of credit that it takes there: never more than the whole worker has."""
        return min(self.charged_blocks, worker.total_blocks)

    def hit_tokens(self, worker: WorkerView) -> int:
        return self.block_tokens * min(worker.hit_blocks, self.reusable_blocks)

    def ready_tokens(self, worker: WorkerView) -> int:
        return self.block_tokens * min(worker.ready_blocks, self.reusable_blocks)


PREFIX_TOKENS = 1024


def early_block(block_hashes: Sequence[bytes], block_tokens: int) -> bytes:
    """The hash that stands for a prompt's beginning: of the last block that ends within PREFIX_TOKENS, if any."""
    last = min(max(PREFIX_TOKENS // block_tokens, 1), len(block_hashes))
    return block_hashes[last - 1] if last else b""


def placement_request(
    request: PreparedRequest,
    attempt_id: int,
    avoided_prefill: frozenset[str] = frozenset(),
    broken_pairs: frozenset[tuple[str, str]] = frozenset(),
    preferred_decode: str | None = None,
) -> PlacementRequest:
    """Return the placement's view of one attempt at a request."""
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
    )
