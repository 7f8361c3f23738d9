"""Rules for repeating a failed call and for resuming an interrupted stream. Pure: time and randomness are arguments."""

from dataclasses import dataclass, replace

from baton.client.answer import Continuity
from baton.client.errors import BatonClientError, Busy, Cancelled, ModelNotFound, ProtocolError, Unavailable
from baton.client.requests import choices, in_parts
from baton.client.responses import Response, event_from
from baton.client.types import Event, Started
from baton.protos import baton_pb2


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of retries. Waits double from `first_wait_s` to `longest_wait_s`; jitter shortens each by up to half.

    If a server asks for a longer wait than `longest_wait_s`, the caller gets its error immediately. A stream that has
    started is not repeated but resumed, up to `resumes` times without progress: with the defaults the client waits
    about 15 s for a router to restart.
    """

    attempts: int = 4  # attempts per router; 1 disables retries and resuming
    resumes: int = 16
    first_wait_s: float = 0.05
    longest_wait_s: float = 2.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.resumes < 0 or not 0 <= self.first_wait_s <= self.longest_wait_s:
            raise ValueError(f"attempts must be at least 1, resumes 0, and 0 <= first_wait_s <= longest_wait_s: {self}")

    def among(self, routers: int) -> "RetryPolicy":
        """Return the policy for a client of `routers` routers, each of which may be restarting."""
        return self if self.attempts == 1 else replace(self, attempts=self.attempts * routers)


class Attempts:
    """Attempts of one call. `timeout_s`: limit for all attempts together; None: the client sets no deadline."""

    def __init__(self, policy: RetryPolicy, timeout_s: float | None, now: float) -> None:
        self._policy = policy
        self._deadline = None if timeout_s is None else now + timeout_s
        self._failed = 0

    def remaining_s(self, now: float) -> float | None:
        return None if self._deadline is None else self._deadline - now

    def wait_s(self, error: BatonClientError, now: float, uniform: float) -> float | None:
        """Return the wait before the next attempt, None if there is no next one. `uniform` is random in [0, 1)."""
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
    """Return the wait that the server asks for, 0 if it names none, None if the call must not be repeated."""
    match error:
        case Unavailable(retry_after_s=after):
            return after or 0.0
        case Cancelled():  # cancelled by a stopping server; closing the client is handled elsewhere
            return 0.0
        case Busy(retry_after_s=after):  # None for a limit of the API key, which a retry does not lift
            return after
        case _:
            return None


Request = baton_pb2.GenerateRequest | baton_pb2.ChatRequest
_PASSING = (None, "DRAINING", "NOT_READY")
"""Reasons of a router that is gone, leaving or starting. Any other reason comes from a running router."""


class Recovery:
    """Streamed answer that survives failures. `method` and `message`: method and request of the next gRPC call.

    A call that fails before its first event is repeated. A later failure is followed by a call that resumes the stream
    after the received tokens, at the same or another router of the cluster. If the router does not know the stream, the
    next call contains the request too.
    """

    def __init__(self, method: str, request: Request, policy: RetryPolicy, timeout_s: float | None, now: float) -> None:
        self.method = method
        self.message: Request | baton_pb2.ResumeRequest = request
        self._request = request
        self._policy = policy
        self._attempts = Attempts(policy, timeout_s, now)
        self._continuity = Continuity(choices(request))
        self._moved = True  # an event arrived since the last failure
        self._breaks = 0  # failures since the last event
        # Each call that resumes a chat in parts contains the request: servers do not keep the options for splitting.
        self._with_request = isinstance(request, baton_pb2.ChatRequest) and in_parts(request)

    def remaining_s(self, now: float) -> float | None:
        return self._attempts.remaining_s(now)

    def take(self, response: Response) -> Event | None:
        """Return the event for the caller, None for the second Started of a resumed stream. Raises: ProtocolError."""
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
        """Return whether every choice has finished, so that a later failure loses nothing."""
        return self._continuity.is_whole

    def end(self) -> None:
        """Check the answer after the stream closed with status OK. Raises: ProtocolError if it is incomplete."""
        self._continuity.end()

    def wait_s(self, error: BatonClientError, now: float, uniform: float) -> float | None:
        """Prepare the next call and return the wait before it; None if there is no next call."""
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
