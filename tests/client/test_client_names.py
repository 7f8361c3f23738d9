"""A name with the addresses of several routers: calls go to each of them, and to none that drains."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.client import AsyncBatonClient, BatonClient, RetryPolicy
from tests.client.conftest import Answer, FakeBaton, serving

ADDRESSES = ("127.0.0.2", "127.0.0.3")
ONCE = RetryPolicy(attempts=1)
CALLS = 8
WAIT_S = 20.0
A_RECORD = bytes.fromhex("c00c 0001 0001 00000001 0004")
"""The name of the question; an IPv4 address, good for a second, of 4 bytes."""


def answer_of(question: bytes) -> bytes:
    """To a question of DNS: ADDRESSES for IPv4, nothing for any other type."""
    end = question.index(b"\0", 12) + 5
    found = ADDRESSES if question[end - 4 : end - 2] == b"\0\1" else ()
    header = question[:2] + bytes.fromhex("8180 0001") + len(found).to_bytes(2, "big") + bytes(4)
    return header + question[12:end] + b"".join(A_RECORD + socket.inet_aton(each) for each in found)


@pytest.fixture
def name_server() -> Iterator[str]:
    """Its address: it gives ADDRESSES for every name."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as server:
        server.bind(("127.0.0.1", 0))

        def serve() -> None:
            while (asked := server.recvfrom(512))[0]:
                server.sendto(answer_of(asked[0]), asked[1])

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", server.getsockname())
        thread.join(WAIT_S)


@dataclass
class Router:
    baton: FakeBaton
    health: health.HealthServicer

    def serves(self, is_serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        self.health.set("", status.SERVING if is_serving else status.NOT_SERVING)


@pytest.fixture
def routers(hello: Answer) -> Iterator[list[Router]]:
    """One on each of ADDRESSES, on the same port."""
    port, made = "0", list[Router]()
    with ExitStack() as servers:
        for address in ADDRESSES:
            router = Router(FakeBaton([hello]), health.HealthServicer())
            add_health = partial(health_pb2_grpc.add_HealthServicer_to_server, router.health)
            servers.enter_context(serving(router.baton, add_health, address=f"{address}:{port}"))
            port = router.baton.target.rpartition(":")[2]
            router.serves(True)
            made.append(router)
        yield made


@pytest.fixture
def target(name_server: str, routers: list[Router]) -> str:
    return f"dns://{name_server}/routers.test:{routers[0].baton.target.rpartition(':')[2]}"


def calls(routers: list[Router]) -> list[int]:
    return [len(router.baton.requests) for router in routers]


def call_until(condition: Callable[[], bool], baton: BatonClient) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        assert baton.complete("hi").text == "hello"


class Left:
    """Whether the last CALLS calls all went to others: a client that goes around all of them has left this one."""

    def __init__(self, routers: list[Router], number: int) -> None:
        self._routers, self._number = routers, number
        self._seen = [calls(routers)]

    def __call__(self) -> bool:
        now = calls(self._routers)
        if now[self._number] > self._seen[-1][self._number]:
            self._seen.clear()
        self._seen.append(now)
        return sum(now) - sum(self._seen[0]) >= CALLS


def test_calls_go_to_every_router_of_a_name_but_draining_ones(target: str, routers: list[Router]) -> None:
    """One that drains would refuse them, on a connection that stays until its last stream has ended."""
    with BatonClient(target, retry=ONCE, timeout_s=WAIT_S) as baton:
        call_until(lambda: all(calls(routers)), baton)  # the first call goes as soon as one is connected
        routers[0].serves(False)
        call_until(Left(routers, 0), baton)  # the client hears of it in its own time
        settled = calls(routers)
        call_until(lambda: calls(routers)[1] >= settled[1] + CALLS, baton)
        assert calls(routers)[0] == settled[0]


async def test_async_client_takes_names_as_well(target: str, routers: list[Router]) -> None:
    async with AsyncBatonClient(target, retry=ONCE, timeout_s=WAIT_S) as baton, asyncio.timeout(WAIT_S):
        while not all(calls(routers)):  # the first call goes as soon as one is connected
            assert (await baton.complete("hi")).text == "hello"
