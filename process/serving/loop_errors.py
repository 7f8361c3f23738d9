"""Errors of the event loop that no code of ours can catch."""

import asyncio
import logging
from typing import Any

_TLS = "Fatal error on SSL protocol"
_CLOSED = "the handler is closed"

logger = logging.getLogger(__name__)


def report_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report as the loop does, with one exception: bytes of a peer after its TLS connection was given up, as on a
    timeout. uvloop reports that as fatal with a traceback; the code that gave up the connection has logged it already.
    """
    error = context.get("exception")
    if context.get("message") == _TLS and isinstance(error, RuntimeError) and _CLOSED in str(error):
        logger.debug("bytes came on a TLS connection that was given up: %s", error)
        return
    loop.default_exception_handler(context)
