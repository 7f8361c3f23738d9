"""Participants of the protocol: which steps client, router and workers make, from what each of them knows. Pure.

The explorer makes every step in every order. A step that its participant makes although the specification does not
enable it is a violation: so the conditions here are those of the code, and those of `specification.py` are the proof
obligations.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, auto
from functools import partial
from typing import NamedTuple

from baton.lab.protocol import specification as spec
from baton.lab.protocol.state import (
    ADOPTABLE,
    GONE,
    NOBODY,
    OVER,
    PINNED,
    AnswerPhase,
    ClientPhase,
    CopyPhase,
    ReaderPhase,
    SourcePhase,
    SpecAttempt,
    SpecRequest,
)

BEYOND_PREFILL = frozenset({AnswerPhase.RUNNING, AnswerPhase.COMPLETE})
CHOICE = 0  # the explored requests have one choice


@dataclass(frozen=True, slots=True)
class ClusterSize:
    """Size of the explored cluster. Each worker has blocks for `rooms` prompts or answers."""

    routers: int = 2
    prefill: int = 2
    decode: int = 2
    requests: int = 2
    deaths: int = 2
    mishaps: int = 0  # leases that expire early, prompts that fail, connections of clients that break
    blocks: int = 2  # blocks of a prompt
    tokens: int = 2  # tokens of an answer
    rooms: int = 1


class MoveKind(IntEnum):
    STEP = auto()  # happens in the end if nothing else does
    LEAVE = auto()  # the client gives up
    MISHAP = auto()  # counted against `ClusterSize.mishaps`


class Move(NamedTuple):
    """Step of a participant. `after`: state after it; None: the specification does not enable the step."""

    name: str
    kind: MoveKind
    after: SpecRequest | None
    refusal: str = ""


Step = tuple[str, MoveKind, "spec.Change"]


def moves(request: SpecRequest, shape: ClusterSize) -> Iterator[Move]:
    """Yield every step that a participant may make."""
    for name, kind, change in _steps(request, shape):
        try:
            yield Move(name, kind, change(request))
        except spec.NotEnabled as refusal:
            yield Move(name, kind, None, str(refusal))


def _steps(request: SpecRequest, shape: ClusterSize) -> Iterator[Step]:
    yield from _of_client(request, shape)
    for stream, each in enumerate(request.streams):
        if each.router != NOBODY:
            yield from _of_router(request, stream, shape)
    for index, attempt in enumerate(request.attempts):
        if attempt.followed and attempt.stream != NOBODY and has_cause(request, attempt, shape):
            yield f"router closes attempt {index}", MoveKind.STEP, partial(_closed, index=index)
        if not attempt.is_orphan or request.client is ClientPhase.WAITING:
            yield from _progress(request, index, attempt, shape)
        yield from _of_ends(index, attempt)


def _of_client(request: SpecRequest, shape: ClusterSize) -> Iterator[Step]:
    if request.client in OVER:
        return
    yield "client leaves", MoveKind.LEAVE, lambda now: _over(now, ClientPhase.LEFT)
    reads = request.reads
    for router in range(shape.routers):
        kind = MoveKind.STEP if request.client is ClientPhase.WAITING else MoveKind.MISHAP
        yield f"client connects to router {router}", kind, partial(spec.connect, router=router)
    if request.client is ClientPhase.WAITING:
        return
    got, released = request.got[CHOICE], request.streams[reads].released[CHOICE]
    if got < released:
        yield "client receives a token", MoveKind.STEP, lambda now: spec.deliver(now, CHOICE, got, 1)
    if got == shape.tokens:
        yield "client has its answer", MoveKind.STEP, lambda now: _over(now, ClientPhase.ANSWERED)


def _of_router(request: SpecRequest, stream: int, shape: ClusterSize) -> Iterator[Step]:
    if request.reads != stream:
        yield f"router closes stream {stream}", MoveKind.STEP, lambda now: _close_stream(now, stream)
        return
    released = request.streams[stream].released[CHOICE]
    followed = [each for each in request.attempts if each.stream == stream and each.followed]
    if any(released < spec.available(each, CHOICE) for each in followed):
        yield "router releases a token", MoveKind.STEP, lambda now: spec.release(now, stream, CHOICE, released, 1)
    if followed or released == shape.tokens:
        return
    yield from _attempts(request, stream, released, shape)


def _attempts(request: SpecRequest, stream: int, released: int, shape: ClusterSize) -> Iterator[Step]:
    for prefill in range(shape.prefill):
        for decode in range(shape.decode):

            def begin(now: SpecRequest, at: int = prefill, then: int = decode) -> SpecRequest:
                return _begun(spec.dispatch(now, stream, (CHOICE,), at, then, carried_tokens(now, stream)))

            yield f"router dispatches to {prefill} and {decode}", MoveKind.STEP, begin
    for index, old in enumerate(request.attempts if request.streams[stream].is_new else ()):
        if old.stream != stream and old.answer in ADOPTABLE | {AnswerPhase.SENT} and released >= old.based:
            yield f"router asks for attempt {index}", MoveKind.STEP, partial(_asked, stream=stream, adopts=index)


def _asked(request: SpecRequest, stream: int, adopts: int) -> SpecRequest:
    return _begun(spec.ask(request, stream, adopts))


def carried_tokens(request: SpecRequest, stream: int) -> int:
    """Return the number of tokens of the answer that the next attempt's prompt contains."""
    return request.streams[stream].released[CHOICE]


def _begun(request: SpecRequest) -> SpecRequest:
    """Write an attempt to the journal: routers find no earlier orphans any more, except one that is asked for."""
    asked = request.attempts[-1].adopts
    for index, attempt in enumerate(request.attempts):
        if attempt.is_orphan and index != asked:
            request = _closed(request, index)
    return request


def _over(request: SpecRequest, client: ClientPhase) -> SpecRequest:
    """End the request. Its router closes all attempts."""
    request = spec.end(request, client)
    for stream, each in enumerate(request.streams):
        if each.router != NOBODY:
            request = _close_stream(request, stream)
    return request


def _close_stream(request: SpecRequest, stream: int) -> SpecRequest:
    for index, attempt in enumerate(request.attempts):
        if attempt.stream == stream and attempt.followed:
            request = _closed(request, index)
    return request.with_stream(stream, router=NOBODY)


def _closed(request: SpecRequest, index: int) -> SpecRequest:
    """Close an attempt and cancel it at its workers.

    The cancel arrives immediately: an attempt without a follower does nothing that another one could notice, except
    that it keeps its blocks.
    """
    return _ended(spec.let_go(request, index), index)


def _ended(request: SpecRequest, index: int) -> SpecRequest:
    """End an attempt on its workers; a running copy still has to finish."""
    attempt = request.attempts[index]
    if attempt.source in PINNED | {SourcePhase.SENT}:
        request = _freed(spec.drop(request, index), index)
    if attempt.answer not in GONE:
        request = _aborted(request, index)
    return request


def forsaken(request: SpecRequest) -> SpecRequest:
    """End the orphans that no router can adopt."""
    asked = {each.adopts for each in request.attempts if each.answer is AnswerPhase.ASKED}
    for index, attempt in enumerate(request.attempts):
        is_lost = request.client in OVER or (attempt.answer in GONE and index not in asked)
        if attempt.is_orphan and is_lost:
            request = _closed(request, index)
    return request


def has_cause(request: SpecRequest, attempt: SpecAttempt, shape: ClusterSize) -> bool:
    """Return whether a router that serves its client closes this attempt: it is complete, or it has failed.

    A lost prefill worker matters until the first token has arrived.
    """
    if request.reads != attempt.stream:
        return False
    released = request.streams[attempt.stream].released[CHOICE]
    if released == shape.tokens or attempt.answer in GONE:
        return True
    return attempt.source is SourcePhase.DEAD and (attempt.answer not in BEYOND_PREFILL or released == attempt.based)


def _progress(request: SpecRequest, index: int, attempt: SpecAttempt, shape: ClusterSize) -> Iterator[Step]:
    """Yield the steps by which workers continue an attempt; those of an orphan precede its adoption."""
    if attempt.source is not SourcePhase.NONE:
        yield from _of_prefill(index, attempt, shape)
    yield from _of_decode(request, index, attempt, shape)


def _of_ends(index: int, attempt: SpecAttempt) -> Iterator[Step]:
    """Yield the steps that end an attempt on workers: a cancel, the end of a link, a finished copy, a lease."""
    source, reader = attempt.source, attempt.reader
    if attempt.copy is not CopyPhase.NONE:
        yield f"decode has copied for {index}", MoveKind.STEP, lambda now: spec.land(now, index, attempt.landed + 1)
    if attempt.is_orphan and attempt.answer not in GONE | {AnswerPhase.ENDING}:
        yield f"decode ends {index}", MoveKind.STEP, lambda now: _aborted(now, index)
    if source in PINNED | {SourcePhase.SENT} and (attempt.is_orphan or attempt.estranged):
        yield f"prefill drops {index}", MoveKind.STEP, lambda now: _freed(spec.drop(now, index), index)
    if frees_unread(attempt):
        yield f"prefill frees {index}", MoveKind.STEP, lambda now: spec.free(now, index)
    parked = source is SourcePhase.SENT and reader is not ReaderPhase.NEVER
    unread = source in PINNED and attempt.offered > 0 and reader is not ReaderPhase.READING
    if parked or unread:
        is_late = not attempt.is_orphan and reader is not ReaderPhase.LOST and not (unread and attempt.answer in GONE)
        kind = MoveKind.MISHAP if is_late else MoveKind.STEP
        yield f"the lease of {index} expires", kind, lambda now: _freed(spec.expire(now, index), index)


def _of_prefill(index: int, attempt: SpecAttempt, shape: ClusterSize) -> Iterator[Step]:
    source = attempt.source
    if source is SourcePhase.SENT:
        yield f"prefill announces {index}", MoveKind.STEP, lambda now: spec.announce(now, index)
    if source is SourcePhase.COMPUTING:
        yield f"prefill offers a block of {index}", MoveKind.STEP, lambda now: _computed(now, index, shape)
        yield f"prefill fails {index}", MoveKind.MISHAP, lambda now: spec.spoil(now, index)
    if source is SourcePhase.SPOILED:
        yield f"prefill drops {index}", MoveKind.STEP, lambda now: spec.drop(now, index)


def _computed(request: SpecRequest, index: int, shape: ClusterSize) -> SpecRequest:
    """Offer the next block; with the last one, the first token is sampled."""
    request = spec.offer(request, index)
    return spec.complete(request, index) if request.attempts[index].offered == shape.blocks else request


def frees_unread(attempt: SpecAttempt) -> bool:
    """Return whether prefill releases the blocks of a transfer that has not ended. It never does."""
    return False


def _freed(request: SpecRequest, index: int) -> SpecRequest:
    return spec.free(request, index)


def _of_decode(request: SpecRequest, index: int, attempt: SpecAttempt, shape: ClusterSize) -> Iterator[Step]:
    answer = attempt.answer
    if answer is AnswerPhase.SENT:
        for cached in {0, request.kept[attempt.decode]}:
            yield f"decode reserves {index}", MoveKind.STEP, partial(_reserved, index=index, cached=cached)
    if answer is AnswerPhase.ASKED:
        yield from _adoptions(request, index, attempt)
    if answer is AnswerPhase.RESERVED:
        yield from _of_pull(index, attempt, shape)
    if answer is AnswerPhase.VALID:
        yield f"decode starts {index}", MoveKind.STEP, lambda now: _started(now, index, shape)
    if answer is AnswerPhase.RUNNING and request.client not in OVER:
        yield f"decode generates for {index}", MoveKind.STEP, lambda now: _generated(now, index, shape)


def _adoptions(request: SpecRequest, index: int, attempt: SpecAttempt) -> Iterator[Step]:
    if can_adopt(request.attempts[attempt.adopts]):
        yield f"decode moves {attempt.adopts} to {index}", MoveKind.STEP, lambda now: spec.adopt(now, index)
    else:
        yield f"decode has no answer for {index}", MoveKind.STEP, lambda now: _disowned(now, index)


def _disowned(request: SpecRequest, index: int) -> SpecRequest:
    old = request.attempts[index].adopts
    request = spec.disown(request, index)
    return _closed(request, old) if request.attempts[old].is_orphan else request


def can_adopt(old: SpecAttempt) -> bool:
    """Return whether the decode worker has an answer under this attempt."""
    return old.answer in ADOPTABLE


def _reserved(request: SpecRequest, index: int, cached: int) -> SpecRequest:
    """Reserve blocks and open the transfer. A refusal of the source shows when the pull continues."""
    request = spec.reserve(spec.arrive(request, index), index, cached)
    if request.attempts[index].source in PINNED | {SourcePhase.SENT, SourcePhase.SPOILED}:
        request = spec.open_transfer(request, index)
    return request


def _of_pull(index: int, attempt: SpecAttempt, shape: ClusterSize) -> Iterator[Step]:
    if attempt.copy is CopyPhase.NONE and attempt.landed < attempt.offered and attempt.reader is not ReaderPhase.NEVER:
        yield f"decode copies for {index}", MoveKind.STEP, lambda now: spec.copy(now, index, attempt.landed + 1)
    if attempt.confirmed < attempt.landed < shape.blocks and attempt.source in PINNED:
        yield f"prefill confirms {index}", MoveKind.STEP, lambda now: spec.confirm(now, index, pinned=True)
    if may_confirm(attempt, shape):
        valid = attempt.source is SourcePhase.COMPLETE
        yield f"decode confirms {index}", MoveKind.STEP, lambda now: _confirmed(now, index, valid)
    if attempt.copy is CopyPhase.NONE and attempt.source in (SourcePhase.ENDED, SourcePhase.DEAD):
        yield f"decode fails {index}", MoveKind.STEP, lambda now: _aborted(now, index)


def may_confirm(attempt: SpecAttempt, shape: ClusterSize) -> bool:
    """Return whether decode closes the transfer: the last watermark has arrived, and all blocks have landed."""
    known = attempt.source in PINNED | {SourcePhase.ENDED} and attempt.first
    return known and attempt.landed == shape.blocks and attempt.copy is CopyPhase.NONE


def _confirmed(request: SpecRequest, index: int, valid: bool) -> SpecRequest:
    """Close the transfer. If the source denies that all blocks were pinned, the pull fails."""
    request = _freed(spec.close(spec.ask_to_close(request, index), index, complete=True, valid=valid), index)
    return request if valid else _aborted(request, index)


def _started(request: SpecRequest, index: int, shape: ClusterSize) -> SpecRequest:
    return _completed(spec.activate(request, index), index, shape)


def _generated(request: SpecRequest, index: int, shape: ClusterSize) -> SpecRequest:
    end = request.attempts[index].made_of(CHOICE) + 1
    return _completed(spec.make(request, index, CHOICE, end), index, shape)


def _completed(request: SpecRequest, index: int, shape: ClusterSize) -> SpecRequest:
    if request.attempts[index].made_of(CHOICE) < shape.tokens:
        return request
    return spec.vacate(spec.retain(request, index), index)


def _aborted(request: SpecRequest, index: int) -> SpecRequest:
    """End an attempt at decode. Blocks of a lost source are kept if it has confirmed them."""
    attempt = request.attempts[index]
    if attempt.source is SourcePhase.DEAD and attempt.answer is AnswerPhase.RESERVED:
        request = spec.keep(request, index, kept_blocks(attempt))
    request = spec.lose_reader(spec.abort(request, index), index)
    if waits_for_copy(request.attempts[index]):
        request = spec.land(request, index, attempt.landed + 1)
    return spec.vacate(request, index)


def kept_blocks(attempt: SpecAttempt) -> int:
    return attempt.confirmed


def waits_for_copy(attempt: SpecAttempt) -> bool:
    """Return whether decode lets a running copy finish before it releases the blocks of an ended attempt."""
    return attempt.copy is not CopyPhase.NONE
