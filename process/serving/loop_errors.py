"""Handler of event-loop errors that no task can catch."""

import asyncio
import logging
from typing import Any

_TLS = "Fatal error on SSL protocol"
_CLOSED = "the handler is closed"

logger = logging.getLogger(__name__)


def report_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report an error as the loop's default handler does, except one about bytes that arrive on an abandoned TLS
    connection.

    uvloop reports that error as fatal with a traceback, although the code that abandoned the connection has already
    logged that.
    """
    error = context.get("exception")
    if context.get("message") == _TLS and isinstance(error, RuntimeError) and _CLOSED in str(error):
        logger.debug("bytes came on a TLS connection that was given up: %s", error)
        return
    loop.default_exception_handler(context)
