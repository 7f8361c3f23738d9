"""Which workers serve a request: a pure function of the request and a snapshot of the cluster.

Least tokens in flight, less what is cached. Decode workers are taken only with credit, so that no prompt is computed
that has nowhere to go.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from router.worker import WorkerRole


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


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    fingerprint: bytes
    block_tokens: int
    prompt_tokens: int
    max_tokens: int  # per choice
    choices: int
    turn: int = 0  # counts requests: equal workers take turns
    avoided_prefill: frozenset[str] = frozenset()  # endpoints that failed this request; taken only if there is no other

    @property
    def worst_blocks(self) -> int:
        """What decode commits: complete prompt blocks once, and for every choice what its longest answer adds."""
        shared = self.prompt_tokens // self.block_tokens
        longest = -(-(self.prompt_tokens + self.max_tokens) // self.block_tokens)
        return shared + self.choices * (longest - shared)

    def hit_tokens(self, worker: WorkerView) -> int:
        """A hit ends before the block that holds the last prompt token, whose logits are needed."""
        return self.block_tokens * min(worker.hit_blocks, (self.prompt_tokens - 1) // self.block_tokens)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where to, and why. Workers are named by endpoint; the counts are of tokens unless named otherwise."""

    prefill: str
    decode: str
    prefill_hit_tokens: int
    decode_hit_tokens: int
    prefill_tokens_in_flight: int
    decode_tokens_in_flight: int
    prefill_candidates: int
    decode_candidates: int


class NoRoom(Enum):
    """Why there is no placement now."""

    NO_PREFILL_WORKER = auto()
    NO_DECODE_WORKER = auto()
    NO_CREDIT = auto()  # wait
    NEVER_FITS = auto()  # no decode worker could hold it even when idle


def place(request: PlacementRequest, workers: Sequence[WorkerView]) -> Placement | NoRoom:
    """`workers` are those that take work now: connected, not draining."""
    suited = [worker for worker in workers if worker.fingerprint == request.fingerprint]
    prefill = [worker for worker in suited if worker.role is WorkerRole.PREFILL]
    decode = [worker for worker in suited if worker.role is WorkerRole.DECODE]
    if not prefill:
        return NoRoom.NO_PREFILL_WORKER
    prefill = [worker for worker in prefill if worker.endpoint not in request.avoided_prefill] or prefill
    if not decode:
        return NoRoom.NO_DECODE_WORKER
    with_credit = [worker for worker in decode if _has_credit(worker, request)]
    if not with_credit:
        return NoRoom.NO_CREDIT if any(_could_hold(worker, request) for worker in decode) else NoRoom.NEVER_FITS
    chosen_prefill = _least_loaded(prefill, request)
    chosen_decode = _least_loaded(with_credit, request)
    return Placement(
        prefill=chosen_prefill.endpoint,
        decode=chosen_decode.endpoint,
        prefill_hit_tokens=request.hit_tokens(chosen_prefill),
        decode_hit_tokens=request.hit_tokens(chosen_decode),
        prefill_tokens_in_flight=chosen_prefill.tokens_in_flight,
        decode_tokens_in_flight=chosen_decode.tokens_in_flight,
        prefill_candidates=len(prefill),
        decode_candidates=len(with_credit),
    )


def _has_credit(worker: WorkerView, request: PlacementRequest) -> bool:
    return (
        worker.used_blocks + request.worst_blocks <= worker.limit_blocks
        and worker.used_slots + request.choices <= worker.limit_slots
    )


def _could_hold(worker: WorkerView, request: PlacementRequest) -> bool:
    return request.worst_blocks <= worker.total_blocks and request.choices <= worker.total_slots


def _least_loaded(workers: Sequence[WorkerView], request: PlacementRequest) -> WorkerView:
    first = request.turn % len(workers)
    in_turn = [*workers[first:], *workers[:first]]
    return min(in_turn, key=lambda worker: worker.tokens_in_flight - request.hit_tokens(worker))
