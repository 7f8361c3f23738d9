"""A client that takes nothing of its answer is let go, and the request says why it was cancelled."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from baton.router.http.edge.exchange import Stalled, StreamedReply, send_reply
from baton.router.trace.record import CallReader, Leave


async def test_the_reader_of_a_stream_that_nobody_takes_has_stalled() -> None:
    reader, sent, why = CallReader(), list[Any](), list[Leave]()

    async def chunks() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"chunk"
        finally:
            why.append(reader.leaves)  # as the request is told when it is closed

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 3:
            await asyncio.Event().wait()

    with pytest.raises(Stalled):
        await send_reply(StreamedReply(chunks()), send, {}, stall_s=0.0, reader=reader)
    assert (len(sent), why) == (3, [Leave.STALLED])
