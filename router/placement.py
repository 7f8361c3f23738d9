"""Which workers serve a request: a pure function of the request and a snapshot of the cluster.

Least tokens in flight, less what is cached. Decode workers are taken only with credit, so that no prompt is computed
that has nowhere to go. A decode worker computes the prompt itself where there is no prefill worker for it, or where so
little of it is not cached there that the way over a prefill worker would take longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from router.worker import Adapter, WorkerRole

CHARGED_ANSWER_TOKENS = 256
"""An answer counts with at most so many tokens against credit; a decode worker preempts where it grows beyond.

Most answers end long before max_tokens, which is the whole context where a client leaves it out: charged in full, a
pool would stand nearly empty.
"""


class NoPrefillWorker(StrEnum):
    """What becomes of a prompt that no prefill worker can compute."""

    QUEUE = auto()  # it waits for one, bounded
    LOCAL = auto()  # the decode worker computes it
    REJECT = auto()  # UNAVAILABLE at once


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    no_prefill_worker: NoPrefillWorker = NoPrefillWorker.LOCAL
    local_prefill_tokens: int = 0  # a decode worker that has the rest of a prompt computes so many tokens itself


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at one moment. `limit_*` are credits, `used_*` and `tokens_in_flight` are this router's own."""

    endpoint: str
    role: WorkerRole
    fingerprint: bytes
    total_blocks: int
    total_slots: int
    limit_blocks: int
    limit_slots: int
    used_blocks: int = 0
    used_slots: int = 0
    tokens_in_flight: int = 0
    hit_blocks: int = 0  # of the request to be placed
    adapters: tuple[Adapter, ...] = ()
    ready_blocks: int = 0  # of those, the ones that another worker could fetch from there now


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    fingerprint: bytes
    block_tokens: int
    prompt_tokens: int
    max_tokens: int  # per choice
    choices: int
    turn: int = 0  # counts requests: equal workers take turns
    avoided_prefill: frozenset[str] = frozenset()  # endpoints that failed this request; taken only if there is no other
    adapter: Adapter | None = None

    def suits(self, worker: WorkerView) -> bool:
        """Whether it has the model, and the adapter if one was chosen."""
        return worker.fingerprint == self.fingerprint and self.adapter in (None, *worker.adapters)

    @property
    def charged_answer_tokens(self) -> int:
        """Per choice."""
        return min(self.max_tokens, CHARGED_ANSWER_TOKENS)

    @property
    def charged_blocks(self) -> int:
        """Complete prompt blocks once, and for every choice what an answer of the charged length adds."""
        shared = self.prompt_tokens // self.block_tokens
        each = -(-(self.prompt_tokens + self.charged_answer_tokens) // self.block_tokens)
        return shared + self.choices * (each - shared)

    @property
    def longest_blocks(self) -> int:
        """One choice at its longest: what a pool must hold at least."""
        return -(-(self.prompt_tokens + self.max_tokens) // self.block_tokens)

    @property
    def reusable_blocks(self) -> int:
        """A hit ends before the block that holds the last prompt token, whose logits are needed."""
        return (self.prompt_tokens - 1) // self.block_tokens

    def hit_tokens(self, worker: WorkerView) -> int:
        return self.block_tokens * min(worker.hit_blocks, self.reusable_blocks)

    def ready_tokens(self, worker: WorkerView) -> int:
        return self.block_tokens * min(worker.ready_blocks, self.reusable_blocks)


class LocalPrefill(StrEnum):
    """Why a decode worker computes the prompt itself."""

    NO_PREFILL_WORKER = auto()
    PREFILL_WORKERS_FAILED = auto()  # each of them failed this request before
    SHORT_SUFFIX = auto()  # next to nothing of the prompt is not cached there


@dataclass(frozen=True, slots=True)
class Placement:
    """Where to, and why. Workers are named by endpoint; the counts are of tokens unless named otherwise."""

    prefill: str | None  # None: the decode worker computes the prompt
    decode: str
    prefill_hit_tokens: int
    decode_hit_tokens: int
    prefill_tokens_in_flight: int
    decode_tokens_in_flight: int
    prefill_candidates: int
    decode_candidates: int
    local_prefill: LocalPrefill | None = None  # given where there is no prefill worker
    fetch_from: str | None = None  # who has more of the prompt than the prefill worker, if anyone
    fetch_tokens: int = 0  # how much of the prompt, from its beginning, that is

    @property
    def endpoints(self) -> tuple[str, ...]:
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)


class NoRoom(Enum):
    """Why there is no placement now."""

    NO_PREFILL_WORKER = auto()
    NO_DECODE_WORKER = auto()
    NO_CREDIT = auto()  # wait
    TOO_LONG = auto()  # one choice at its longest is more than the pool of any decode worker
    TOO_MANY_CHOICES = auto()  # more sequences than any decode worker runs at once


def place(request: PlacementRequest, workers: Sequence[WorkerView], policy: PlacementPolicy) -> Placement | NoRoom:
    """`workers` are those that take work now: connected, not draining."""
    suited = [worker for worker in workers if request.suits(worker)]
    prefill = [worker for worker in suited if worker.role is WorkerRole.PREFILL]
    decode = [worker for worker in suited if worker.role is WorkerRole.DECODE]
    if not prefill and policy.no_prefill_worker is not NoPrefillWorker.LOCAL:
        return NoRoom.NO_PREFILL_WORKER
    if not decode:
        return NoRoom.NO_DECODE_WORKER
    with_credit = [worker for worker in decode if _has_credit(worker, request)]
    if not with_credit:
        return _why_no_credit(decode, request)
    chosen_decode = _least_loaded(with_credit, request)
    decode_hit_tokens = request.hit_tokens(chosen_decode)
    untried = [worker for worker in prefill if worker.endpoint not in request.avoided_prefill]
    local = _why_local(request, decode_hit_tokens, prefill, untried, policy)
    chosen_prefill = None if local else _least_loaded(untried or prefill, request)
    source = _fetch_source(request, suited, chosen_decode, chosen_prefill) if chosen_prefill else None
    return Placement(
        prefill=chosen_prefill.endpoint if chosen_prefill else None,
        decode=chosen_decode.endpoint,
        prefill_hit_tokens=request.hit_tokens(chosen_prefill) if chosen_prefill else 0,
        decode_hit_tokens=decode_hit_tokens,
        prefill_tokens_in_flight=chosen_prefill.tokens_in_flight if chosen_prefill else 0,
        decode_tokens_in_flight=chosen_decode.tokens_in_flight,
        prefill_candidates=len(untried or prefill),
        decode_candidates=len(with_credit),
        local_prefill=local,
        fetch_from=source.endpoint if source else None,
        fetch_tokens=request.ready_tokens(source) if source else 0,
    )


def _fetch_source(
    request: PlacementRequest, suited: Sequence[WorkerView], decode: WorkerView, prefill: WorkerView
) -> WorkerView | None:
    """Who has most of the prompt ready, if that is more than the prefill worker has; it may fetch it from there."""
    others = [worker for worker in suited if worker is not prefill]
    best = max(others, key=lambda worker: (request.ready_tokens(worker), worker is decode))
    return best if request.ready_tokens(best) > request.hit_tokens(prefill) else None


def _why_local(
    request: PlacementRequest,
    decode_hit_tokens: int,
    prefill: Sequence[WorkerView],
    untried: Sequence[WorkerView],
    policy: PlacementPolicy,
) -> LocalPrefill | None:
    """None: a prefill worker computes it."""
    if not prefill:
        return LocalPrefill.NO_PREFILL_WORKER
    if not untried and policy.no_prefill_worker is NoPrefillWorker.LOCAL:
        return LocalPrefill.PREFILL_WORKERS_FAILED
    if decode_hit_tokens and request.prompt_tokens - decode_hit_tokens <= policy.local_prefill_tokens:
        return LocalPrefill.SHORT_SUFFIX
    return None


def _has_credit(worker: WorkerView, request: PlacementRequest) -> bool:
    """A request that is charged more than our share of the pool gets it when we have nothing else there."""
    if not _could_hold(worker, request) or worker.used_slots + request.choices > worker.limit_slots:
        return False
    return worker.used_blocks + request.charged_blocks <= worker.limit_blocks or (
        worker.used_blocks == 0 and worker.limit_blocks > 0
    )


def _could_hold(worker: WorkerView, request: PlacementRequest) -> bool:
    return request.longest_blocks <= worker.total_blocks and request.choices <= worker.total_slots


def _why_no_credit(decode: Sequence[WorkerView], request: PlacementRequest) -> NoRoom:
    if any(_could_hold(worker, request) for worker in decode):
        return NoRoom.NO_CREDIT
    if any(request.choices <= worker.total_slots for worker in decode):
        return NoRoom.TOO_LONG
    return NoRoom.TOO_MANY_CHOICES


def _least_loaded(workers: Sequence[WorkerView], request: PlacementRequest) -> WorkerView:
    first = request.turn % len(workers)
    in_turn = [*workers[first:], *workers[:first]]
    return min(in_turn, key=lambda worker: worker.tokens_in_flight - request.hit_tokens(worker))
