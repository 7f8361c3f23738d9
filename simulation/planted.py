"""Bugs to be found: each is one that could be in our code, put there for the time of a run."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from decode_worker.answer import Answer
from engine.mixed_state import TokenMade
from engine.prefill_scheduler import PrefillScheduler
from router import session_wire
from simulation.calls import current_process


def dropped_pin() -> AbstractContextManager[Any]:
    """A computed prompt gives its pages back before anybody has read them, and its reader is told that all is well."""
    real = PrefillScheduler._pin

    def pin(self: PrefillScheduler, prompt: Any) -> None:
        real(self, prompt)
        self.release(prompt.request.request_id)

    return patch.object(PrefillScheduler, "_pin", pin)


def reused_transfer_id() -> AbstractContextManager[Any]:
    """A router gives the right to read one prompt's KV out twice: each second attempt has that of the one before."""
    real, drawn = session_wire.Tag, dict[tuple[str, int], bytes]()

    def tag(**fields: Any) -> session_wire.Tag:
        pair = (current_process().name, fields["attempt_id"] // 2)
        return real(**{**fields, "transfer_id": drawn.setdefault(pair, fields["transfer_id"])})

    return patch.object(session_wire, "Tag", tag)


def off_by_one_offset() -> AbstractContextManager[Any]:
    """A decode worker that goes on with an answer says of its tokens that they stand one place before theirs."""
    real = Answer.take

    def take(self: Answer, made: TokenMade) -> Any:
        output = real(self, made)
        if output is not None and self.answered_tokens:
            output.offset -= 1
        return output

    return patch.object(Answer, "take", take)


PLANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dropped-pin": dropped_pin,
    "reused-transfer-id": reused_transfer_id,
    "off-by-one-offset": off_by_one_offset,
}


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """None: nothing is."""
    with PLANTS[name]() if name is not None else nullcontext():
        yield
