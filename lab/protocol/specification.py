"""Steps of the specification: what router, prefill worker, decode worker and client may do, and when. Pure.

Each step is a function of a request's state that returns the next state, or raises NotEnabled. The explorer
(`explorer.py`) makes all of them in every order; the trace check (`trace_check.py`) makes those that the code made.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto

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
    SpecStream,
)

Change = Callable[[SpecRequest], SpecRequest]


class NotEnabled(Exception):
    """Error: the specification does not allow the step in this state."""


class ProcessKind(Enum):
    ROUTER = auto()
    PREFILL = auto()
    DECODE = auto()


def require(condition: bool, why: str) -> None:
    """Raise NotEnabled unless the condition holds."""
    if not condition:
        raise NotEnabled(why)


# Client and router


def connect(request: SpecRequest, router: int, carried: tuple[int, ...] | None = None) -> SpecRequest:
    """Begin or resume the client's stream.

    `carried`: number of tokens by choice after which the router continues; None: those that the client has.
    """
    require(request.client not in OVER, "the client has ended its request")
    streams = (*request.streams, SpecStream(router, request.got if carried is None else carried))
    return request._replace(client=ClientPhase.READING, reads=len(request.streams), streams=streams)


def dispatch(
    request: SpecRequest, stream: int, choices: Sequence[int], prefill: int, decode: int, based: int
) -> SpecRequest:
    """Send an attempt to its workers. Its prompt contains exactly the tokens that the router has released."""
    _check_alone(request, stream, choices)
    released = request.streams[stream].released
    require(all(released[choice] == based for choice in choices), "the prompt does not end at the last released token")
    source = SourcePhase.NONE if prefill == NOBODY else SourcePhase.SENT
    made = (based,) * len(choices)
    attempt = SpecAttempt(stream, prefill, decode, tuple(choices), based, source, AnswerPhase.SENT, made)
    return _sent(request, stream, attempt)


def ask(request: SpecRequest, stream: int, adopts: int) -> SpecRequest:
    """Send the command to adopt the answer of another router's attempt. The client must have the prompt's tokens."""
    old = request.attempts[adopts]
    _check_alone(request, stream, old.choices)
    released = request.streams[stream].released
    require(old.stream != stream and request.streams[stream].is_new, "an answer is adopted by its own stream")
    require(all(released[choice] >= old.based for choice in old.choices), "the client lacks tokens before the answer")
    attempt = SpecAttempt(
        stream,
        NOBODY,
        old.decode,
        old.choices,
        old.based,
        SourcePhase.NONE,
        AnswerPhase.ASKED,
        made=(old.based,) * len(old.choices),
        adopts=adopts,
    )
    return _sent(request, stream, attempt)


def _sent(request: SpecRequest, stream: int, attempt: SpecAttempt) -> SpecRequest:
    return request.with_stream(stream, is_new=False)._replace(attempts=(*request.attempts, attempt))


def _check_alone(request: SpecRequest, stream: int, choices: Sequence[int]) -> None:
    others = (each for each in request.attempts if each.stream == stream and each.followed)
    require(not any(set(choices) & set(each.choices) for each in others), "two attempts are open for one choice")


def let_go(request: SpecRequest, index: int) -> SpecRequest:
    """Close an attempt at its router, which may cancel it at the workers."""
    require(request.attempts[index].followed, "the attempt is closed already")
    return request.with_attempt(index, followed=False)


def release(request: SpecRequest, stream: int, choice: int, offset: int, count: int) -> SpecRequest:
    """Release tokens to the client: the next ones in order, which a worker has generated for an open attempt."""
    released = list(request.streams[stream].released)
    require(offset == released[choice], "a token is released twice, or one is left out")
    followed = (each for each in request.attempts if each.stream == stream and each.followed)
    sent = max((available(each, choice) for each in followed if choice in each.choices), default=0)
    require(offset + count <= sent, "a token is released that no worker has generated for an open attempt")
    released[choice] += count
    return request.with_stream(stream, released=tuple(released))


def available(attempt: SpecAttempt, choice: int) -> int:
    """Return the number of tokens of a choice that the workers may have sent."""
    return max(attempt.made_of(choice), attempt.based + attempt.first)


def deliver(request: SpecRequest, choice: int, offset: int, count: int, in_order: bool = True) -> SpecRequest:
    """Deliver released tokens. `in_order`: False if choices are renumbered, as in a best-of answer."""
    require(request.client is ClientPhase.READING, "the client reads no stream")
    require(offset == request.got[choice], "the client receives a token twice, or one is left out")
    end, released = offset + count, request.streams[request.reads].released
    require(not in_order or end <= released[choice], "the client receives a token that was not released")
    got = list(request.got)
    got[choice] = end
    return request._replace(got=tuple(got))


def end(request: SpecRequest, client: ClientPhase) -> SpecRequest:
    """End the request at its client."""
    require(request.client not in OVER, "the request ends twice")
    return request._replace(client=client, reads=NOBODY)


# Prefill worker: the prompt, and the source of its transfer


def announce(request: SpecRequest, index: int) -> SpecRequest:
    require(request.attempts[index].source is SourcePhase.SENT, "the transfer id is used twice")
    return request.with_attempt(index, source=SourcePhase.COMPUTING)


def offer(request: SpecRequest, index: int, blocks: int = 1) -> SpecRequest:
    """Make computed blocks readable; they are pinned from now on."""
    attempt = request.attempts[index]
    require(attempt.source is SourcePhase.COMPUTING, "blocks are offered for a transfer that is not computing")
    return request.with_attempt(index, offered=attempt.offered + blocks)


def complete(request: SpecRequest, index: int) -> SpecRequest:
    """Sample the first tokens, which go to the router and to the reader."""
    require(request.attempts[index].source is SourcePhase.COMPUTING, "a prompt that is not computing completes")
    return request.with_attempt(index, source=SourcePhase.COMPLETE, first=True)


def expire(request: SpecRequest, index: int) -> SpecRequest:
    """End a transfer without a reader, or a reader's wait for the command."""
    attempt = request.attempts[index]
    parked = attempt.source is SourcePhase.SENT and attempt.reader is not ReaderPhase.NEVER
    pinned = attempt.source in PINNED and attempt.reader is not ReaderPhase.READING
    require(parked or pinned, "a lease expires although a reader reads or nothing is pinned")
    return request.with_attempt(index, source=SourcePhase.ENDED)


def drop(request: SpecRequest, index: int) -> SpecRequest:
    """End a transfer because its prompt was cancelled or failed."""
    require(request.attempts[index].source is not SourcePhase.NONE, "a transfer without a prefill worker is dropped")
    return request.with_attempt(index, source=SourcePhase.ENDED)


def close(request: SpecRequest, index: int, complete: bool, valid: bool) -> SpecRequest:
    """End a transfer at its reader's request. `valid`: the source says that every block was pinned throughout."""
    attempt = request.attempts[index]
    require(not complete or attempt.closing, "a copy is confirmed that no reader has completed")
    right = complete and attempt.source is SourcePhase.COMPLETE
    require(valid == right, "the source confirms blocks that were not pinned throughout, or denies pinned ones")
    require(not valid or attempt.sound == attempt.landed, "a torn copy is confirmed")
    request = request.with_attempt(index, source=SourcePhase.ENDED)
    still_wanted = valid and attempt.answer is AnswerPhase.RESERVED
    return request.with_attempt(index, answer=AnswerPhase.VALID) if still_wanted else request


def confirm(request: SpecRequest, index: int, pinned: bool) -> SpecRequest:
    """Confirm during the pull that all landed blocks have been pinned so far."""
    attempt = request.attempts[index]
    require(not pinned or attempt.source in PINNED, "the source confirms blocks that are not pinned")
    return request.with_attempt(index, confirmed=attempt.landed) if pinned else request


def free(request: SpecRequest, index: int) -> SpecRequest:
    """Release the prompt's blocks. From now on they may hold the KV of another request."""
    attempt = request.attempts[index]
    require(attempt.source not in PINNED, "pinned blocks are released")
    return _tear(request, index)


def spoil(request: SpecRequest, index: int) -> SpecRequest:
    """Release the blocks of a prompt that failed in the engine, which ends the transfer a moment later."""
    require(request.attempts[index].source is SourcePhase.COMPUTING, "a prompt fails that is not computing")
    return _tear(request, index).with_attempt(index, source=SourcePhase.SPOILED)


def _tear(request: SpecRequest, index: int) -> SpecRequest:
    if request.attempts[index].copy is CopyPhase.INTACT:
        return request.with_attempt(index, copy=CopyPhase.TORN)
    return request


# Decode worker: the pull and the answer


def arrive(request: SpecRequest, index: int) -> SpecRequest:
    require(request.attempts[index].answer is AnswerPhase.SENT, "a command arrives twice")
    return request.with_attempt(index, answer=AnswerPhase.ARRIVED)


def reserve(request: SpecRequest, index: int, cached: int = 0) -> SpecRequest:
    """Reserve blocks for the prompt. `cached`: number of leading blocks that have their KV already."""
    require(request.attempts[index].answer is AnswerPhase.ARRIVED, "blocks are reserved for no waiting attempt")
    return request.with_attempt(index, answer=AnswerPhase.RESERVED, landed=cached, sound=cached)


def open_transfer(request: SpecRequest, index: int) -> SpecRequest:
    """Open the stream of watermarks, perhaps before the prefill command arrives."""
    attempt = request.attempts[index]
    has_had_blocks = attempt.answer in GONE | {AnswerPhase.RESERVED, AnswerPhase.ENDING}  # a cancel may overtake
    require(has_had_blocks, "a transfer is read without blocks for it")
    require(attempt.reader is not ReaderPhase.READING, "a transfer has two readers")
    require(attempt.source in PINNED | {SourcePhase.SENT, SourcePhase.SPOILED}, "a transfer is read after its end")
    return request.with_attempt(index, reader=ReaderPhase.READING)


def lose_reader(request: SpecRequest, index: int) -> SpecRequest:
    """End the stream of watermarks at the source. The lease begins."""
    if request.attempts[index].reader is not ReaderPhase.READING:
        return request
    return request.with_attempt(index, reader=ReaderPhase.LOST)


def copy(request: SpecRequest, index: int, end: int) -> SpecRequest:
    """Begin to copy the blocks up to number `end`, which the source has offered."""
    attempt = request.attempts[index]
    require(attempt.answer is AnswerPhase.RESERVED, "blocks are copied into a request that has none reserved")
    require(attempt.copy is CopyPhase.NONE, "two copies run for one attempt")
    require(attempt.landed < end <= attempt.offered, "a block is copied that was not offered, or is there already")
    held = attempt.source in PINNED or attempt.source is SourcePhase.DEAD  # a mapping outlives its owner
    return request.with_attempt(index, copy=CopyPhase.INTACT if held else CopyPhase.TORN)


def land(request: SpecRequest, index: int, end: int) -> SpecRequest:
    """Finish a copy; `end` as for `copy`."""
    attempt = request.attempts[index]
    require(attempt.copy is not CopyPhase.NONE, "a copy ends that did not begin")
    intact = attempt.copy is CopyPhase.INTACT and attempt.sound == attempt.landed
    request = request.with_attempt(index, copy=CopyPhase.NONE, landed=end, sound=end if intact else attempt.sound)
    if attempt.answer is AnswerPhase.ENDING:
        request = request.with_attempt(index, answer=AnswerPhase.ENDED)
    return request


def ask_to_close(request: SpecRequest, index: int) -> SpecRequest:
    """Ask the source to confirm the complete copy."""
    attempt = request.attempts[index]
    require(attempt.answer is AnswerPhase.RESERVED, "a copy is confirmed that no pull made")
    require(attempt.copy is CopyPhase.NONE, "the copy is confirmed while it runs")
    require(attempt.landed == attempt.offered > 0, "the copy is confirmed before all blocks have landed")
    return request.with_attempt(index, closing=True)


def abandon_copy(request: SpecRequest, index: int) -> SpecRequest:
    """Finish a copy without its blocks, because it failed."""
    attempt = request.attempts[index]
    answer = AnswerPhase.ENDED if attempt.answer is AnswerPhase.ENDING else attempt.answer
    return request.with_attempt(index, copy=CopyPhase.NONE, answer=answer)


def abort(request: SpecRequest, index: int) -> SpecRequest:
    """End an attempt at its decode worker, which waits for a running copy."""
    attempt = request.attempts[index]
    require(attempt.answer not in GONE, "an attempt ends twice at its decode worker")
    answer = AnswerPhase.ENDED if attempt.copy is CopyPhase.NONE else AnswerPhase.ENDING
    return request.with_attempt(index, answer=answer)


def keep(request: SpecRequest, index: int, blocks: int) -> SpecRequest:
    """Cache the leading blocks of a failed pull for the next attempt."""
    attempt, kept = request.attempts[index], list(request.kept)
    require(blocks <= attempt.confirmed, "blocks are kept that the source has not confirmed")
    require(blocks <= attempt.sound, "blocks of a torn copy are kept")
    if kept:
        kept[attempt.decode] = max(kept[attempt.decode], blocks)
    return request._replace(kept=tuple(kept))


def vacate(request: SpecRequest, index: int) -> SpecRequest:
    """Release the blocks that the decode worker has for an attempt."""
    attempt = request.attempts[index]
    require(attempt.copy is CopyPhase.NONE, "blocks are released while a copy into them runs")
    require(attempt.answer is not AnswerPhase.RESERVED, "blocks are released while their pull continues")
    return request


def activate(request: SpecRequest, index: int) -> SpecRequest:
    """Start to generate, with the first tokens from the prefill worker."""
    attempt = request.attempts[index]
    require(attempt.answer is AnswerPhase.VALID, "an answer starts without a confirmed copy")
    made = (attempt.based + 1,) * len(attempt.choices)
    return request.with_attempt(index, answer=AnswerPhase.RUNNING, made=made)


def begin_alone(request: SpecRequest, index: int) -> SpecRequest:
    """Start an answer whose prompt the decode worker computes."""
    attempt = request.attempts[index]
    computes = attempt.source is SourcePhase.NONE and attempt.answer is AnswerPhase.ARRIVED
    require(computes, "an answer starts without its prompt's KV")
    return request.with_attempt(index, answer=AnswerPhase.RUNNING)


def make(request: SpecRequest, index: int, choice: int, end: int) -> SpecRequest:
    """Generate one more token of a choice. `end`: number of the choice's tokens with it."""
    attempt = request.attempts[index]
    require(attempt.answer is AnswerPhase.RUNNING, "a token is generated for an answer that does not run")
    made = list(attempt.made)
    place = attempt.choices.index(choice)
    require(end == made[place] + 1, "a token has a wrong offset")
    made[place] = end
    return request.with_attempt(index, made=tuple(made))


def retain(request: SpecRequest, index: int) -> SpecRequest:
    """Complete an answer. Its tokens are retained in case another router adopts it."""
    attempt = request.attempts[index]
    require(attempt.answer in (AnswerPhase.RUNNING, AnswerPhase.VALID), "an answer completes that does not run")
    made = tuple(max(attempt.based + 1, each) for each in attempt.made)
    return request.with_attempt(index, answer=AnswerPhase.COMPLETE, made=made)


def adopt(request: SpecRequest, index: int) -> SpecRequest:
    """Move an answer, with its pull and its tokens, to the attempt that asks for it. Each answer has one attempt."""
    attempt = request.attempts[index]
    require(attempt.answer is AnswerPhase.ASKED, "an adoption is carried out twice")
    old = request.attempts[attempt.adopts]
    require(old.answer in ADOPTABLE, "an answer is adopted that ended, or that another attempt has")
    moved = old._replace(stream=attempt.stream, followed=attempt.followed, first=False, estranged=True, adopts=NOBODY)
    attempts = list(request.attempts)
    attempts[index] = moved
    attempts[attempt.adopts] = old._replace(
        source=SourcePhase.NONE, answer=AnswerPhase.ADOPTED, copy=CopyPhase.NONE, reader=ReaderPhase.NEVER
    )
    return request._replace(attempts=tuple(attempts))


def disown(request: SpecRequest, index: int) -> SpecRequest:
    """Refuse an adoption: the decode worker does not have the answer."""
    attempt = request.attempts[index]
    require(attempt.answer is AnswerPhase.ASKED, "an adoption is refused twice")
    old = request.attempts[attempt.adopts].answer
    require(old not in ADOPTABLE or old is AnswerPhase.COMPLETE, "an adoption is refused although the answer is there")
    return request.with_attempt(index, answer=AnswerPhase.ENDED)


# Environment


def die(request: SpecRequest, kind: ProcessKind, process: int) -> SpecRequest:
    """End a process. Another one may start under its name; it knows nothing of earlier attempts."""
    if kind is ProcessKind.ROUTER:
        return _router_died(request, process)
    attempts = list(request.attempts)
    for index, attempt in enumerate(attempts):
        if kind is ProcessKind.PREFILL and attempt.prefill == process and attempt.source is not SourcePhase.NONE:
            attempts[index] = attempt._replace(source=SourcePhase.DEAD)
        if kind is ProcessKind.DECODE and attempt.decode == process and attempt.answer is not AnswerPhase.ADOPTED:
            reader = ReaderPhase.LOST if attempt.reader is ReaderPhase.READING else attempt.reader
            attempts[index] = attempt._replace(answer=AnswerPhase.DEAD, copy=CopyPhase.NONE, reader=reader)
    kept = list(request.kept)
    if kind is ProcessKind.DECODE and kept:
        kept[process] = 0
    return request._replace(attempts=tuple(attempts), kept=tuple(kept))


def _router_died(request: SpecRequest, router: int) -> SpecRequest:
    lost = {index for index, stream in enumerate(request.streams) if stream.router == router}
    streams = tuple(
        stream._replace(router=NOBODY) if index in lost else stream for index, stream in enumerate(request.streams)
    )
    attempts = tuple(each._replace(stream=NOBODY) if each.stream in lost else each for each in request.attempts)
    return request._replace(streams=streams, attempts=attempts)
