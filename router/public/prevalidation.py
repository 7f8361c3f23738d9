"""Large gRPC messages without holding the event loop: a process of their own reports their errors, or that they have
so few parts that parsing them takes a millisecond or two.
"""

import json

from google.protobuf.message import Message

from baton.router.admission.queue import RETRY_AFTER_S
from baton.router.public.malformed import NotPrevalidated
from baton.service.errors import InvalidArgument, ResourceExhausted, Unavailable
from baton.service.helper import Asks, HelperBusy, HelperFailed

FAULT, SOUND = b"\1", b"\0"
"""How an answer of `prevalidation_process` begins: before an error as JSON, or the message without unknown fields."""


class Prevalidation:
    """To be closed."""

    def __init__(self, helper: Asks) -> None:
        """`helper` runs `prevalidation_process`."""
        self._helper = helper
        self.prevalidated = 0

    async def __call__(self, message: NotPrevalidated) -> Message:
        """Raises: InvalidArgument, ResourceExhausted, Unavailable."""
        self.prevalidated += 1
        message_class = message.message_class
        try:
            answer = await self._helper.ask([f"{message_class.DESCRIPTOR.full_name}\n".encode(), message.data])
        except HelperBusy:
            busy = "too many large messages are being checked"
            raise ResourceExhausted(busy, RETRY_AFTER_S, "too_many_large_messages") from None
        except HelperFailed as error:
            raise Unavailable("the message could not be checked", "NOT_LOOKED_AT", RETRY_AFTER_S) from error
        verdict, rest = answer[:1], memoryview(answer)[1:]
        if verdict == FAULT:
            field, description = json.loads(bytes(rest))
            raise InvalidArgument(field, description)
        return message_class.FromString(bytes(rest))

    def close(self) -> None:
        self._helper.close()
