"""Connections from outside to hosts, and loopback ports that forward to them."""

import asyncio
import contextlib
import ctypes
import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.lab.harness.hosts.holder import CLONE_NEWNET

CHUNK_BYTES = 1 << 16
CONNECT_S = 5.0


def socket_in(first_process: int, family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    """Return a TCP socket in the network namespace of that process. Raises: OSError."""
    made: list[socket.socket] = []
    failed: list[OSError] = []

    def make() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            fd = os.open(f"/proc/{first_process}/ns/net", os.O_RDONLY)
            try:
                if libc.setns(fd, CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            finally:
                os.close(fd)
            made.append(socket.socket(family, socket.SOCK_STREAM))
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=make)  # setns affects only this thread, which then ends
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


@asynccontextmanager
async def forwarded(first_process: int, address: str, port: int, listen_port: int = 0) -> AsyncIterator[str]:
    """Yield a loopback address that forwards to `address` and `port` in the network of that process.

    `listen_port`: 0 for any free port. Raises: OSError if it is in use.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    open_ones: set[asyncio.StreamWriter] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = socket_in(first_process, family)
        there.setblocking(False)
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().sock_connect(there, (address, port))
        except (OSError, TimeoutError):
            there.close()
            writer.transport.abort()
            return
        there_reader, there_writer = await asyncio.open_connection(sock=there)
        ends = {writer, there_writer}
        open_ones.update(ends)
        ways = [asyncio.create_task(_pass_on(*way)) for way in ((reader, there_writer), (there_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            open_ones.difference_update(ends)
            for end in ends:
                end.close()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    server = await asyncio.start_server(connected, "127.0.0.1", listen_port)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in tuple(open_ones):
            writer.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
