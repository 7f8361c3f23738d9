"""Bodies to messages without holding the event loop: small ones at once, large ones in a process of their own.

While one is parsed no stream gets a token, so a body that is parsed here takes a millisecond or two at most. The other
process's result is read on a thread, in steps as short as those.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import TypeVar

from pydantic import BaseModel

from baton.gateway.http.problem import Problem
from baton.gateway.parsing.packing import unpack
from baton.gateway.parsing.parse import SMALL_BYTES, is_small, json_size, parse
from baton.service.helper import Asks, HelperBusy, HelperFailed

Message = TypeVar("Message", bound=BaseModel)

_RETRY_S = 1.0


class Parser:
    """To be closed."""

    def __init__(self, helper: Asks) -> None:
        """`helper` runs gateway.parse_process."""
        self._helper = helper
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="unpack")
        self.parsed_elsewhere = 0

    async def parse(self, message_type: type[Message], parts: Sequence[bytes]) -> Message:
        """Raises: Problem that names the first field that is wrong; of a helper that fails, one with status 503."""
        if sum(map(len, parts)) <= SMALL_BYTES:
            body = b"".join(parts)
            size = json_size(body)
            if is_small(size) or size.excess is not None:
                return parse(message_type, body)
        self.parsed_elsewhere += 1
        try:
            packed = await self._helper.ask([f"{message_type.__name__}\n".encode(), *parts])
        except HelperBusy:
            raise _unavailable("too many large bodies are being parsed") from None
        except HelperFailed as error:
            raise _unavailable("the body could not be parsed") from error
        return await asyncio.get_running_loop().run_in_executor(self._thread, unpack, message_type, memoryview(packed))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._helper.close()


def _unavailable(message: str) -> Problem:
    return Problem(HTTPStatus.SERVICE_UNAVAILABLE, message, retry_after_s=_RETRY_S)
