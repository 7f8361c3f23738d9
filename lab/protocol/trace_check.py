"""Check of a trace: makes the step of the specification that belongs to each event of the code. Pure.

`lab/simulation/recorder.py` reports the events in the order in which they happen. The first event whose step is not
enabled is the refusal; later events are ignored, because the state does not follow the code any more.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.lab.protocol import specification as spec
from baton.lab.protocol.specification import NotEnabled, ProcessKind, require
from baton.lab.protocol.state import (
    GONE,
    NOBODY,
    OVER,
    PINNED,
    AnswerPhase,
    ClientPhase,
    SourcePhase,
    SpecAttempt,
    SpecRequest,
)

_LEFT_OVER = PINNED | {SourcePhase.SPOILED}


class TracedAttempt(NamedTuple):
    """Attempt of a traced request. `number`: index among the request's attempts."""

    request_id: str
    number: int


class TracedStream(NamedTuple):
    """Stream of a traced request. `number`: index among the request's streams."""

    request_id: str
    number: int


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Attempt that a router sends to workers. `prefill`, `decode`: names of the workers."""

    key: Hashable
    transfer_id: bytes
    choices: Sequence[int]
    prefill: str | None
    decode: str
    based: int


class TraceCheck:
    """State of the specification that follows a trace. `refusal`: the first event that the specification refuses."""

    def __init__(self) -> None:
        self.refusal: str | None = None
        self.steps = 0
        self._requests: dict[str, SpecRequest] = {}
        self._unordered: set[str] = set()  # requests whose choices are renumbered for the client
        self._processes: dict[str, int] = {}
        self._streams: dict[Hashable, TracedStream] = {}
        self._attempts: dict[Hashable, TracedAttempt] = {}
        self._transfers: dict[bytes, TracedAttempt] = {}
        self._offered: dict[bytes, list[int]] = {}  # physical blocks by transfer
        self._at_worker: dict[Hashable, TracedAttempt] = {}  # by process and by the request's number there

    # Client

    def asked_by_client(self, request_id: str, choices: int, in_order: bool) -> None:
        self._requests[request_id] = SpecRequest(ClientPhase.WAITING, (0,) * choices)
        if not in_order:
            self._unordered.add(request_id)

    def delivered(self, request_id: str, choice: int, offset: int, count: int) -> None:
        in_order = request_id not in self._unordered
        self._make(request_id, "client receives tokens", lambda now: spec.deliver(now, choice, offset, count, in_order))

    def ended(self, request_id: str, client: ClientPhase) -> None:
        self._make(request_id, "client ends its request", lambda now: spec.end(now, client))

    # Router

    def connected(self, stream: Hashable, request_id: str, router: str, carried: Sequence[int]) -> None:
        """Begin a stream. `carried`: number of tokens by choice that the router counts as received.

        A stream that begins after its client has ended the request, since the call was delayed, is not checked.
        """
        if request_id not in self._requests or self._requests[request_id].client in OVER:
            return

        def begin(now: SpecRequest) -> SpecRequest:
            known = request_id in self._unordered or tuple(carried) == now.got
            require(known, "the router continues the stream after other tokens than the client has")
            return spec.connect(now, self._number(router), tuple(carried))

        self._streams[stream] = TracedStream(request_id, len(self._requests[request_id].streams))
        self._make(request_id, f"{router} begins a stream", begin)

    def dispatched(self, stream: Hashable, sent: Dispatched) -> None:
        where = self._streams.get(stream)
        if where is None:
            return
        self._track(sent.key, where)
        prefill = NOBODY if sent.prefill is None else self._number(sent.prefill)
        decode = self._number(sent.decode)
        if sent.prefill is not None:
            if sent.transfer_id in self._transfers:
                self._refuse(where.request_id, "router dispatches", "a transfer id is used twice")
            self._transfers[sent.transfer_id] = self._attempts[sent.key]
            self._offered[sent.transfer_id] = []
        self._make(
            where.request_id,
            "router dispatches",
            lambda now: spec.dispatch(now, where.number, sent.choices, prefill, decode, sent.based),
        )

    def asked_to_adopt(self, stream: Hashable, key: Hashable, old: Hashable) -> None:
        where, adopts = self._streams.get(stream), self._attempts.get(old)
        if where is None or adopts is None:
            return
        self._track(key, where)
        self._make(
            where.request_id, "router asks for an answer", lambda now: spec.ask(now, where.number, adopts.number)
        )

    def closed_by_router(self, key: Hashable) -> None:
        self._of_attempt(self._attempts.get(key), "router closes an attempt", spec.let_go)

    def released(self, stream: Hashable, choice: int, offset: int, count: int) -> None:
        where = self._streams.get(stream)
        if where is not None and count:
            self._make(
                where.request_id,
                "router releases tokens",
                lambda now: spec.release(now, where.number, choice, offset, count),
            )

    # Source of a transfer

    def announced(self, transfer_id: bytes) -> None:
        self._of_source(transfer_id, "prefill announces a transfer", spec.announce)

    def offered(self, transfer_id: bytes, blocks: Sequence[int]) -> None:
        if transfer_id in self._offered and blocks:
            self._offered[transfer_id] += blocks
            self._of_source(transfer_id, "prefill offers blocks", lambda now, at: spec.offer(now, at, len(blocks)))

    def completed(self, transfer_id: bytes) -> None:
        self._of_source(transfer_id, "prefill completes a prompt", spec.complete)

    def opened(self, transfer_id: bytes) -> None:
        self._of_source(transfer_id, "decode opens a transfer", spec.open_transfer)

    def reader_lost(self, transfer_id: bytes) -> None:
        self._of_source(transfer_id, "a reader is lost", spec.lose_reader)

    def closed(self, transfer_id: bytes, complete: bool, valid: bool) -> None:
        what = "decode confirms a copy" if complete else "decode gives up a transfer"
        self._of_source(transfer_id, what, lambda now, at: spec.close(now, at, complete, valid))

    def asked_to_close(self, transfer_id: bytes) -> None:
        self._of_attempt(self._transfers.get(transfer_id), "decode asks to confirm a copy", spec.ask_to_close)

    def confirmed(self, transfer_id: bytes, pinned: bool) -> None:
        self._of_source(transfer_id, "prefill confirms blocks", lambda now, at: spec.confirm(now, at, pinned))

    def dropped(self, transfer_id: bytes) -> None:
        self._of_source(transfer_id, "prefill drops a transfer", spec.drop)

    def expired(self, transfer_ids: Iterable[bytes]) -> None:
        for transfer_id in transfer_ids:
            self._of_source(transfer_id, "a lease expires", spec.expire)

    # Copies

    def copy_began(self, transfer_id: bytes, pairs: Sequence[tuple[int, int]]) -> None:
        """Begin a copy. `pairs`: logical and physical number of each source block."""
        where, offered = self._transfers.get(transfer_id), self._offered.get(transfer_id, [])
        if where is None:
            return
        if any(logical >= len(offered) or offered[logical] != physical for logical, physical in pairs):
            self._refuse(where.request_id, "decode copies", "a block is read that was not offered for this request")
        end = pairs[-1][0] + 1
        self._of_attempt(where, "decode copies", lambda now, at: spec.copy(now, at, end))

    def copy_ended(self, transfer_id: bytes, end: int, is_done: bool) -> None:
        where = self._transfers.get(transfer_id)
        if where is None or self._attempt(where).answer is AnswerPhase.DEAD:
            return
        if is_done:
            self._of_attempt(where, "decode has copied", lambda now, at: spec.land(now, at, end))
        else:
            self._of_attempt(where, "a copy fails", spec.abandon_copy)

    # Workers

    def arrived(self, worker_request: Hashable, key: Hashable, is_answer: bool) -> None:
        """Begin an attempt at a worker. `worker_request`: process and number of the request there."""
        where = self._attempts.get(key)
        if where is None:
            return
        self._at_worker[worker_request] = where
        if is_answer:
            self._of_attempt(where, "a command arrives at decode", spec.arrive)

    def reserved(self, worker_request: Hashable, cached: int) -> None:
        where = self._at_worker.get(worker_request)
        if where is not None and self._attempt(where).answer not in GONE:  # else cancelled while the engine reserved
            self._of_attempt(where, "decode reserves blocks", lambda now, at: spec.reserve(now, at, cached))

    def activated(self, worker_request: Hashable) -> None:
        self._of_attempt(self._at_worker.get(worker_request), "decode starts an answer", spec.activate)

    def made(self, key: Hashable, choice: int, end: int) -> None:
        where = self._attempts.get(key)
        if where is None:
            return
        attempt = self._attempt(where)
        if attempt.source is SourcePhase.NONE and attempt.answer is AnswerPhase.ARRIVED:
            self._of_attempt(where, "decode starts an answer", spec.begin_alone)
        self._of_attempt(where, "decode generates a token", lambda now, at: spec.make(now, at, choice, end))

    def retained(self, key: Hashable) -> None:
        self._of_attempt(self._attempts.get(key), "decode completes an answer", spec.retain)

    def aborted(self, key: Hashable) -> None:
        self._of_attempt(self._attempts.get(key), "decode ends an attempt", spec.abort)

    def kept(self, worker_request: Hashable, blocks: int) -> None:
        where = self._at_worker.get(worker_request)
        self._of_attempt(where, "decode keeps blocks", lambda now, at: spec.keep(now, at, blocks))

    def blocks_released(self, worker_request: Hashable, is_pinned: bool, prefill_only: bool) -> None:
        """Release the blocks of a sequence. `is_pinned`: it is a computed prompt that waits for its reader."""
        where = self._at_worker.get(worker_request)
        if where is None:
            return
        if not prefill_only:
            self._of_attempt(where, "decode releases blocks", spec.vacate)
        elif self._attempt(where).source is SourcePhase.COMPUTING and not is_pinned:
            self._of_attempt(where, "a prompt fails in the engine", spec.spoil)
        else:
            self._of_attempt(where, "prefill releases blocks", spec.free)

    def adopted(self, key: Hashable, old: Hashable, is_known: bool) -> None:
        """Carry out a command to adopt. `is_known`: the worker has the answer."""
        where, before = self._attempts.get(key), self._attempts.get(old)
        if where is None or before is None:
            return
        if not is_known:
            self._of_attempt(where, "decode refuses an adoption", spec.disown)
            return
        self._of_attempt(where, "decode moves an answer", spec.adopt)
        for places in (self._transfers, self._at_worker):
            for each, at in places.items():
                if at == before:
                    places[each] = where  # type: ignore[index]

    def died(self, name: str, kind: ProcessKind) -> None:
        number = self._number(name)
        for request_id in self._requests:
            self._make(request_id, f"{name} dies", lambda now: spec.die(now, kind, number))

    # End

    def left_over(self) -> str | None:
        """Return what is left of requests after all of them should have ended; None if nothing is."""
        for request_id, request in self._requests.items():
            if request.client not in OVER:
                return f"{request_id}: the request never ended"
            for attempt in request.attempts:
                followed = attempt.followed and attempt.stream != NOBODY
                if followed or attempt.source in _LEFT_OVER or attempt.answer not in GONE | {AnswerPhase.COMPLETE}:
                    is_unheard = attempt.answer in (AnswerPhase.SENT, AnswerPhase.ASKED) and not followed
                    if not (is_unheard and attempt.source not in _LEFT_OVER):
                        return f"{request_id}: an attempt is left: {attempt}"
        return None

    def _number(self, process: str) -> int:
        return self._processes.setdefault(process, len(self._processes))

    def _track(self, key: Hashable, where: TracedStream) -> None:
        self._attempts[key] = TracedAttempt(where.request_id, len(self._requests[where.request_id].attempts))

    def _attempt(self, where: TracedAttempt) -> SpecAttempt:
        return self._requests[where.request_id].attempts[where.number]

    def _of_source(self, transfer_id: bytes, what: str, change: Callable[[SpecRequest, int], SpecRequest]) -> None:
        """Make a step of a transfer, unless its prefill worker died: another process under its name knows nothing."""
        where = self._transfers.get(transfer_id)
        if where is not None and self._attempt(where).source is not SourcePhase.DEAD:
            self._of_attempt(where, what, change)

    def _of_attempt(
        self, where: TracedAttempt | None, what: str, change: Callable[[SpecRequest, int], SpecRequest]
    ) -> None:
        if where is not None:
            self._make(where.request_id, f"{what} (attempt {where.number})", lambda now: change(now, where.number))

    def _make(self, request_id: str, what: str, change: Callable[[SpecRequest], SpecRequest]) -> None:
        if self.refusal is not None or request_id not in self._requests:
            return
        self.steps += 1
        try:
            self._requests[request_id] = change(self._requests[request_id])
        except NotEnabled as refusal:
            self._refuse(request_id, what, str(refusal))

    def _refuse(self, request_id: str, what: str, why: str) -> None:
        if self.refusal is None:
            self.refusal = f"{request_id}: {what}: {why}"
