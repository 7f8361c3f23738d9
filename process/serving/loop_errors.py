"""Handler of event-loop errors that no task can catch."""

import asyncio
import logging
from typing import Any

_TLS = "Fatal error on SSL protocol"
_CLOSED = "the handler is closed"

logger = logging.getLogger(__name__)


def report_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report an error as the loop's default handler does. Errors about bytes on a closed TLS connection are only debug
    messages.

    uvloop reports such an error as fatal with a traceback, although the code that closed the connection has already
    logged the reason.
    """
    error = context.get("exception")
    if context.get("message") == _TLS and isinstance(error, RuntimeError) and _CLOSED in str(error):
        logger.debug("ignoring bytes received on a closed TLS connection: %s", error)
        return
    loop.default_exception_handler(context)
