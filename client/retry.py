"""When a failed call is made again, and one streamed answer across failures. Pure, given time and a random number."""

from dataclasses import dataclass, replace

from baton.client.answer import Continuity
from baton.client.errors import BatonClientError, Busy, Cancelled, ModelNotFound, ProtocolError, Unavailable
from baton.client.requests import choices, in_parts
from baton.client.responses import Response, event_from
from baton.client.types import Event, Started
from baton.protos import baton_pb2


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Waits double from `first_wait_s` to `longest_wait_s`, each drawn between half and all of its value.

    A server that asks for more than `longest_wait_s` is not waited for: the caller gets its error at once. A stream
    that has begun is not made again but resumed where it broke, `resumes` times until something comes: with the
    defaults a router that restarts is waited for some 15 s.
    """

    attempts: int = 4  # in all, at each router of a cluster; 1: never again, nor resumed
    resumes: int = 16
    first_wait_s: float = 0.05
    longest_wait_s: float = 2.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.resumes < 0 or not 0 <= self.first_wait_s <= self.longest_wait_s:
            raise ValueError(f"attempts must be at least 1, resumes 0, and the waits ordered: {self}")

    def among(self, routers: int) -> "RetryPolicy":
        """For a client that takes another router where one is gone, and may find that one just coming back."""
        return self if self.attempts == 1 else replace(self, attempts=self.attempts * routers)


class Attempts:
    """The attempts of one call. `timeout_s` None: no deadline of the client's own."""

    def __init__(self, policy: RetryPolicy, timeout_s: float | None, now: float) -> None:
        self._policy = policy
        self._deadline = None if timeout_s is None else now + timeout_s
        self._failed = 0

    def remaining_s(self, now: float) -> float | None:
        return None if self._deadline is None else self._deadline - now

    def wait_s(self, error: BatonClientError, now: float, uniform: float) -> float | None:
        """How long to wait before the next attempt; None: there is none. `uniform` is in [0, 1)."""
        self._failed += 1
        if self._failed >= self._policy.attempts:
            return None
        asked_s = _asked_wait_s(error)
        if asked_s is None or asked_s > self._policy.longest_wait_s:
            return None
        doubled_s = min(self._policy.first_wait_s * 2 ** (self._failed - 1), self._policy.longest_wait_s)
        wait_s = asked_s + doubled_s * (0.5 + uniform / 2)
        remaining_s = self.remaining_s(now)
        return wait_s if remaining_s is None or wait_s < remaining_s else None


def _asked_wait_s(error: BatonClientError) -> float | None:
    """The wait that the server asks for, 0 where it leaves that to us; None: the call is not to be repeated."""
    match error:
        case Unavailable(retry_after_s=after):
            return after or 0.0
        case Cancelled():  # by a server that stops; closing the client does not come here
            return 0.0
        case Busy(retry_after_s=after):  # without a time to come back it is a limit, not a rush
            return after
        case _:
            return None


Request = baton_pb2.GenerateRequest | baton_pb2.ChatRequest
_PASSING = (None, "DRAINING", "NOT_READY")
"""Reasons why a router is gone, or about to be, or not there yet; any other was found out by one that lives."""


class Recovery:
    """One streamed answer across failures: `method` of BatonService and `message` are the call to be made next.

    Before its first message a call is simply made again. After that the stream is resumed, at the same router or
    another one of its cluster, behind the received tokens. A router that does not know the stream is sent the request
    with it.
    """

    def __init__(self, method: str, request: Request, policy: RetryPolicy, timeout_s: float | None, now: float) -> None:
        self.method = method
        self.message: Request | baton_pb2.ResumeRequest = request
        self._request = request
        self._policy = policy
        self._attempts = Attempts(policy, timeout_s, now)
        self._continuity = Continuity(choices(request))
        self._moved = True  # something came since the last failure
        self._breaks = 0  # since something came
        # An answer in parts is read by the request; the server does not keep how.
        self._with_request = isinstance(request, baton_pb2.ChatRequest) and in_parts(request)

    def remaining_s(self, now: float) -> float | None:
        return self._attempts.remaining_s(now)

    def take(self, response: Response) -> Event | None:
        """The caller's event; None for the repeated beginning of a resumed stream. Raises: ProtocolError."""
        event = event_from(response)
        if self._continuity.started is not None and isinstance(event, Started):
            if event != self._continuity.started:
                raise ProtocolError("the server resumed another answer")
            return None
        self._continuity.accept(event)
        self._moved = True
        return event

    @property
    def is_whole(self) -> bool:
        """Every choice has ended: a later failure loses nothing."""
        return self._continuity.is_whole

    def end(self) -> None:
        """The stream ended with status OK. Raises: ProtocolError if it should not have."""
        self._continuity.end()

    def wait_s(self, error: BatonClientError, now: float, uniform: float) -> float | None:
        """How long to wait before the next call, which is set here; None: there is none."""
        started = self._continuity.started
        if started is None:
            return self._attempts.wait_s(error, now, uniform)
        if not started.resume_token or self._policy.attempts == 1:
            return None
        if self._moved:
            resumes = replace(self._policy, attempts=self._policy.resumes + 1)
            self._attempts = Attempts(resumes, self._attempts.remaining_s(now), now)
            self._moved, self._breaks = False, 0
        wait_s = self._resume_wait_s(error, now, uniform)
        self.method, self.message = "Resume", self._resume(started)
        return wait_s

    def _resume_wait_s(self, error: BatonClientError, now: float, uniform: float) -> float | None:
        if isinstance(error, ModelNotFound) and not self._with_request:
            self._with_request = True
            return 0.0
        if not isinstance(error, Unavailable | Busy | Cancelled):
            return None
        self._breaks += 1
        if error.reason not in _PASSING and self._breaks >= self._policy.attempts:
            return None
        return self._attempts.wait_s(error, now, uniform)

    def _resume(self, started: Started) -> baton_pb2.ResumeRequest:
        message = baton_pb2.ResumeRequest(
            request_id=started.request_id,
            resume_token=started.resume_token,
            prompt_tokens=self._continuity.prompt_tokens,
            choices=[
                baton_pb2.ReceivedChoice(
                    index=index,
                    token_ids=each.token_ids,
                    text_bytes=each.text_bytes,
                    finished=each.finished,
                    calls=each.calls,
                )
                for index, each in self._continuity.received.items()
            ],
        )
        if self._with_request:
            asked = message.generate if isinstance(self._request, baton_pb2.GenerateRequest) else message.chat
            asked.MergeFrom(self._request)  # type: ignore[arg-type]
            asked.request_id, asked.sampling.seed = started.request_id, started.seed
        return message
