"""What the event loop finds is logged as ever, but for bytes that come after a TLS connection was given up."""

import asyncio
import logging

import pytest

from baton.process.serving.loop_errors import report_loop_error

CLOSED = RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")
TLS = "Fatal error on SSL protocol"


@pytest.mark.parametrize(
    ("message", "error", "is_shown"),
    [
        (TLS, CLOSED, False),
        (TLS, RuntimeError("another"), True),
        (TLS, IndexError("the handler is closed"), True),
        ("Exception in callback", CLOSED, True),
    ],
)
async def test_only_an_abandoned_connection_is_no_error(
    message: str, error: Exception, is_shown: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        report_loop_error(asyncio.get_running_loop(), {"message": message, "exception": error})
    assert [record.levelno for record in caplog.records] == ([logging.ERROR] if is_shown else [])
