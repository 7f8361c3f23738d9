"""Redis is killed, paused, flushed, restarted empty or mute: requests do not wait, and processes reconnect."""

import asyncio
import signal
import socket
import urllib.request
from collections.abc import Callable

import pytest

from tests.e2e.faulty import WORKERS, Served, redis_of, redis_port, restart_redis, serve_some, while_streaming
from tests.e2e.stack import Stack

pytestmark = pytest.mark.alone
ADDED_S = 0.15  # most that a request may take longer: half of one timeout of Redis
SEEN_S = 15.0
RECOVERED_S = 15.0


def ask(port: int, *words: str) -> bytes:
    """Send a command to Redis."""
    with socket.create_connection(("127.0.0.1", port), timeout=SEEN_S) as connection:
        parts = (f"${len(word)}\r\n{word}\r\n" for word in words)
        connection.sendall("".join((f"*{len(words)}\r\n", *parts)).encode())
        return connection.recv(1 << 16)


def announced(stack: Stack) -> int:
    """Return how many workers have a record in Redis."""
    reply = ask(redis_port(stack), "KEYS", "baton:*:worker:*")
    return int(reply[1 : reply.index(b"\r\n")])


def metric(stack: Stack, name: str) -> float:
    with urllib.request.urlopen(f"{stack.url}/metrics", timeout=SEEN_S) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


async def unnoticed(stack: Stack, usual: Served) -> None:
    """Check that requests take no longer than usual."""
    assert (await serve_some(stack)).median_s < usual.median_s + ADDED_S


async def seen_as_lost(stack: Stack) -> None:
    await until(stack, lambda: not stack.status().registry_connected, SEEN_S, "loss seen")
    status = stack.status()
    assert status.ready and "registry" in status.detail
    assert sum(worker.connected for worker in status.workers) == len(WORKERS)
    assert metric(stack, "baton:registry_connected") == 0


async def found_again(stack: Stack) -> None:
    await until(stack, lambda: stack.status().registry_connected, RECOVERED_S, "return seen")
    await until(stack, lambda: announced(stack) == len(WORKERS), RECOVERED_S, "workers announced again")
    assert metric(stack, "baton:registry_connected") == 1


async def test_requests_survive_a_killed_muted_and_emptied_redis(faulty: Stack) -> None:
    usual = await serve_some(faulty)

    async def kill_and_bring_back() -> None:
        assert ask(redis_port(faulty), "SET", "kept", "1") == b"+OK\r\n"
        redis_of(faulty).process.kill()
        assert redis_of(faulty).process.wait(SEEN_S) == -signal.SIGKILL
        await unnoticed(faulty, usual)
        await seen_as_lost(faulty)
        with socket.socket() as hole:  # takes connections on the port of Redis and never answers
            hole.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            hole.bind(("127.0.0.1", redis_port(faulty)))
            hole.listen(64)
            await unnoticed(faulty, usual)
            await seen_as_lost(faulty)
        restart_redis(faulty)
        assert ask(redis_port(faulty), "GET", "kept") == b"$-1\r\n", "it did not begin empty"
        await found_again(faulty)
        await unnoticed(faulty, usual)

    await while_streaming(faulty, kill_and_bring_back)
    assert not faulty.status().detail


async def test_requests_survive_a_flushed_and_paused_redis(faulty: Stack) -> None:
    usual = await serve_some(faulty)

    async def flush_and_pause() -> None:
        assert ask(redis_port(faulty), "FLUSHALL") == b"+OK\r\n"
        await unnoticed(faulty, usual)
        await found_again(faulty)
        redis_of(faulty).process.send_signal(signal.SIGSTOP)
        try:
            await unnoticed(faulty, usual)
            await seen_as_lost(faulty)
            await unnoticed(faulty, usual)
        finally:
            redis_of(faulty).process.send_signal(signal.SIGCONT)
        await found_again(faulty)

    await while_streaming(faulty, flush_and_pause)
    assert not faulty.status().detail


async def until(stack: Stack, condition: Callable[[], bool], within_s: float, what: str) -> None:
    await asyncio.to_thread(stack.wait_for, condition, within_s, what)
