"""The chaos proxy forwards, holds, delays and cuts each link on its own, and counts what it did."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.lab.chaos.proxy import LinkWay, Owners, Proxy, Rule
from baton.process.registry.redis_server import free_port
from tests.fixtures.session_client import WAIT_S, eventually

BOUND_S = WAIT_S
QUIET_S = 0.1


@asynccontextmanager
async def echo(proxy: Proxy, port: int) -> AsyncIterator[None]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1024):
            writer.write(data)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", port):
        await proxy.start()
        try:
            yield
        finally:
            await proxy.close()


class Line:
    """Connection through the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> "Line":
        return cls(*await asyncio.open_connection("127.0.1.9", port))

    async def says(self, text: bytes) -> bytes:
        self.writer.write(text)
        async with asyncio.timeout(BOUND_S):
            return await self.reader.readexactly(len(text))

    def close(self) -> None:
        self.writer.close()


@pytest.fixture
def port() -> int:
    return free_port()


def proxy_for(port: int, who: str = "router-0") -> Proxy:
    return Proxy(("127.0.1.9", port), ("127.0.0.1", port), lambda _: who)


async def test_bytes_pass_unless_a_direction_is_held(port: int) -> None:
    proxy = proxy_for(port)
    async with echo(proxy, port):
        line = await Line.open(port)
        assert await line.says(b"one") == b"one"
        for times, way in enumerate(LinkWay, start=1):
            proxy.set_rule("router-0", Rule(held=frozenset((way,))))
            waiting = asyncio.create_task(line.says(b"two"))
            await held(proxy, times)
            _, pending = await asyncio.wait({waiting}, timeout=QUIET_S)
            assert pending, f"it came through although {way} is held"
            proxy.set_rule("router-0", Rule())
            assert await waiting == b"two"
        assert proxy.counts("router-0").held == 2
        line.close()


async def held(proxy: Proxy, times: int) -> None:
    await eventually(lambda: proxy.counts("router-0").held == times)


async def test_delay_is_kept_and_counted(port: int) -> None:
    proxy = proxy_for(port)
    async with echo(proxy, port):
        line = await Line.open(port)
        proxy.set_rule("router-0", Rule(delay_s=0.05))
        began_s = asyncio.get_running_loop().time()
        assert await line.says(b"late") == b"late"
        assert asyncio.get_running_loop().time() - began_s >= 0.1
        assert proxy.counts("router-0").delayed == 2
        line.close()


async def test_cut_breaks_open_connections_and_accepts_new_ones(port: int) -> None:
    proxy = proxy_for(port)
    async with echo(proxy, port):
        line = await Line.open(port)
        await line.says(b"one")
        assert proxy.cut("router-0") == 1 == proxy.counts("router-0").cut
        async with asyncio.timeout(BOUND_S):
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await line.says(b"two")
        line.close()
        again = await Line.open(port)
        assert await again.says(b"three") == b"three"
        again.close()


async def test_cut_of_another_link_breaks_nothing(port: int) -> None:
    proxy = proxy_for(port)
    async with echo(proxy, port):
        line = await Line.open(port)
        await line.says(b"one")
        assert proxy.cut("router-1") == 0
        assert await line.says(b"two") == b"two"
        line.close()


async def test_exited_process_behind_the_proxy_looks_gone(port: int) -> None:
    proxy = proxy_for(port)
    await proxy.start()
    try:
        with pytest.raises(ConnectionRefusedError):
            await Line.open(port)
    finally:
        await proxy.close()


async def test_returning_process_is_reached_and_exiting_one_refuses(port: int) -> None:
    proxy = proxy_for(port)
    await proxy.start()
    for _ in range(2):
        async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", port):
            await until(port, is_open=True)
        await until(port, is_open=False)
    await proxy.close()


async def until(port: int, is_open: bool) -> None:
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                line = await Line.open(port)
            except ConnectionRefusedError:
                if not is_open:
                    return
            except ConnectionResetError:
                pass  # it stopped listening at that very moment
            else:
                line.close()
                if is_open:
                    return
            await asyncio.sleep(0.01)


async def test_owner_of_a_connection_is_the_process_that_made_it(port: int) -> None:
    child = await asyncio.create_subprocess_exec("sleep", "60")
    found: list[str | None] = []

    async def look(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client_port = writer.get_extra_info("peername")[1]
        found.append(Owners().find(client_port, ("127.0.1.9", port), {"other": child.pid, "we": os.getpid()}))
        found.append(Owners().find(client_port, ("127.0.1.9", port), {"other": child.pid}))
        writer.write(b"x")
        writer.close()

    async with await asyncio.start_server(look, "127.0.1.9", port):
        line = await Line.open(port)
        assert await line.says(b"x") == b"x"
        line.close()
    child.kill()
    await child.wait()
    assert found == ["we", None]
