"""State of one request in the specification: its client, its streams at routers, and its attempts on workers. Pure.

Messages in flight have no state of their own: a step of the receiver is enabled once the sender has made its step. A
block that is not held may hold anything, such as the KV of another request: a copy is torn as soon as its source block
is released.
"""

from enum import IntEnum, auto
from typing import Any, NamedTuple, Self

NOBODY = -1
"""No process or no index: no prefill worker, a router that is gone, no adopted attempt."""


class ClientPhase(IntEnum):
    WAITING = auto()  # without a stream
    READING = auto()
    ANSWERED = auto()
    FAILED = auto()
    LEFT = auto()


OVER = frozenset({ClientPhase.ANSWERED, ClientPhase.FAILED, ClientPhase.LEFT})


class SourcePhase(IntEnum):
    """Phase of a prompt and its transfer at the prefill worker."""

    NONE = auto()  # the decode worker computes the prompt
    SENT = auto()  # the command is in flight
    COMPUTING = auto()  # announced; offered blocks are pinned
    COMPLETE = auto()  # all blocks are offered and pinned; the first tokens are sampled
    SPOILED = auto()  # the engine has failed the prompt and released its blocks; the transfer has not ended yet
    ENDED = auto()  # closed, dropped or expired: nothing is pinned, and the transfer id is refused
    DEAD = auto()  # the process is gone


PINNED = frozenset({SourcePhase.COMPUTING, SourcePhase.COMPLETE})


class ReaderPhase(IntEnum):
    """Phase of the decode worker's stream of watermarks, as the prefill worker sees it."""

    NEVER = auto()
    READING = auto()
    LOST = auto()


class AnswerPhase(IntEnum):
    """Phase of an attempt at the decode worker."""

    SENT = auto()  # the command is in flight
    ASKED = auto()  # the command to adopt another attempt's answer is in flight
    ARRIVED = auto()  # without blocks
    RESERVED = auto()  # with blocks, into which a pull copies
    VALID = auto()  # the source has confirmed the complete copy
    RUNNING = auto()  # generates tokens
    COMPLETE = auto()  # without blocks; the tokens are retained for an adoption
    ENDING = auto()  # cancelled while a copy into its blocks runs
    ENDED = auto()
    ADOPTED = auto()  # moved to another attempt
    DEAD = auto()  # the process is gone


ADOPTABLE = frozenset(
    {AnswerPhase.ARRIVED, AnswerPhase.RESERVED, AnswerPhase.VALID, AnswerPhase.RUNNING, AnswerPhase.COMPLETE}
)
WITH_BLOCKS = frozenset({AnswerPhase.RESERVED, AnswerPhase.VALID, AnswerPhase.RUNNING, AnswerPhase.ENDING})
GONE = frozenset({AnswerPhase.ENDED, AnswerPhase.ADOPTED, AnswerPhase.DEAD})


class CopyPhase(IntEnum):
    NONE = auto()
    INTACT = auto()  # the source blocks have been held since the copy began
    TORN = auto()  # a source block was released before the copy finished


class SpecStream(NamedTuple):
    """Stream from a router to the client."""

    router: int
    released: tuple[int, ...]  # number of released tokens by choice, including those of earlier streams
    is_new: bool = True  # without an attempt so far; only then the journal's record of an earlier stream is read


class SpecAttempt(NamedTuple):
    """Attempt of a router at one or more choices of the request."""

    stream: int  # stream that the attempt serves; NOBODY: its router is gone
    prefill: int  # NOBODY: the decode worker computes the prompt
    decode: int
    choices: tuple[int, ...]
    based: int  # number of tokens of the answer that the prompt contains
    source: SourcePhase
    answer: AnswerPhase
    made: tuple[int, ...]  # number of tokens that the decode worker has, by choice, including `based`
    reader: ReaderPhase = ReaderPhase.NEVER
    offered: int = 0  # number of blocks that the source has offered
    copy: CopyPhase = CopyPhase.NONE
    landed: int = 0  # number of leading blocks that the decode worker has
    sound: int = 0  # number of leading blocks whose copies were intact
    closing: bool = False  # the decode worker has asked the source to confirm the complete copy
    confirmed: int = 0  # number of leading blocks that the source confirmed during the pull
    first: bool = False  # the prefill worker has sent the first tokens
    adopts: int = NOBODY  # attempt whose answer this one asks for
    followed: bool = True  # no router has closed the attempt; one that is gone cannot close it
    estranged: bool = False  # the answer was adopted; the prefill command was another router's

    @property
    def is_orphan(self) -> bool:
        """Return whether the attempt's router died, so that another router may adopt its answer."""
        return self.followed and self.stream == NOBODY

    def made_of(self, choice: int) -> int:
        return self.made[self.choices.index(choice)]


class SpecRequest(NamedTuple):
    """Request of one client."""

    client: ClientPhase
    got: tuple[int, ...]  # number of tokens that the client has, by choice
    reads: int = NOBODY  # stream that the client reads
    streams: tuple[SpecStream, ...] = ()
    attempts: tuple[SpecAttempt, ...] = ()
    kept: tuple[int, ...] = ()  # leading blocks kept from a failed pull, by decode worker; empty: not modelled

    def with_attempt(self, index: int, **changes: Any) -> Self:
        attempts = list(self.attempts)
        attempts[index] = attempts[index]._replace(**changes)
        return self._replace(attempts=tuple(attempts))

    def with_stream(self, index: int, **changes: Any) -> Self:
        streams = list(self.streams)
        streams[index] = streams[index]._replace(**changes)
        return self._replace(streams=tuple(streams))
