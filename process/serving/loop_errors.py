"""What the event loop says of errors that no code of ours can catch."""

import asyncio
import logging
from typing import Any

_TLS = "Fatal error on SSL protocol"
_CLOSED = "the handler is closed"

logger = logging.getLogger(__name__)


def report_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """As the loop does, but for one: a peer's bytes came after a TLS connection was given up, as at a time limit.
    uvloop calls that fatal and shows a traceback. Who gave it up has said so already.
    """
    error = context.get("exception")
    if context.get("message") == _TLS and isinstance(error, RuntimeError) and _CLOSED in str(error):
        logger.debug("bytes came on a TLS connection that was given up: %s", error)
        return
    loop.default_exception_handler(context)
