"""Clients that mean no good, each kind in its way: `.venv/bin/python -m baton.lab.benchmarks.clients.abusers`.

KIND HOST HTTP_PORT GRPC_PORT SECONDS. Says `begun` when it has, and at its end what it was answered, as JSON: how often
each status, `cut off` where a connection was ended without one.
"""

import asyncio
import itertools
import json
import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import grpc

from baton.protos import baton_pb2

Answers = Counter[str]
Abuse = Callable[["Target"], Awaitable[None]]

PAUSE_S = 0.02
UNREAD_S = 4.0  # longer than abuse.LIMITS allow
ANSWER_S = 60.0
_MEGABYTE = 1 << 20
_STATUS_LINE = b"HTTP/1.1 "


class Target:
    def __init__(self, host: str, port: int, grpc_port: int) -> None:
        self.host, self.port, self.grpc_port = host, port, grpc_port
        self.answers: Answers = Counter()

    async def open(self, receive_bytes: int | None = None) -> socket.socket:
        made = socket.socket()
        made.setblocking(False)
        if receive_bytes is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(made, (self.host, self.port))
        return made

    def head(self, path: str, length: int | None) -> bytes:
        framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        return f"POST {path} HTTP/1.1\r\nhost: {self.host}\r\n{framing}\r\n\r\n".encode()

    async def ask(self, path: str, body: bytes) -> None:
        """One request on a connection of its own; what came of it is counted."""
        await self.send(self.head(path, len(body)) + body)

    async def send(self, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        made = await self.open()
        with made:
            # A client that is refused early may not get rid of the rest: the answer is there all the same.
            with suppress(ConnectionError):
                await loop.sock_sendall(made, request)
            try:
                async with asyncio.timeout(ANSWER_S):
                    answer = await loop.sock_recv(made, 4096)
            except (ConnectionError, TimeoutError):
                answer = b""
        self.answers[_status(answer) if answer else "cut off"] += 1


async def malformed(target: Target) -> None:
    """Bodies that are no JSON, or no request, in every size up to the largest."""
    path = "/v1/completions"
    for body in itertools.cycle(_malformed()):
        await target.ask(path, body)
        await asyncio.sleep(PAUSE_S)


def _malformed() -> Iterator[bytes]:
    yield from (b"", b"{", b"[1]", b"\xff\xfe", b'{"prompt": 5}', b'{"prompt": "a", "n": "many"}')
    yield b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    yield b'{"prompt":[' + b"[1]," * 250_000 + b"[1]]}"
    yield b'{"prompt":[' + b"1," * 250_000 + b'"x"]}'
    yield b'{"prompt":"' + b"a" * (4 * _MEGABYTE - 100)
    yield b'{"messages":[' + b'{"role":"user","content":"a"},' * 130_000 + b"{}]}"
    yield b"{" + b",".join(b'"a%d":1' % number for number in range(250_000)) + b"}"


async def large(target: Target) -> None:
    """Prompts of 10 MB, with their length named and without, and what just passes for a body."""
    ten, path = b'{"prompt":"' + b"a" * (10 * _MEGABYTE) + b'"}', "/v1/completions"
    chunk = b"%x\r\n" % _MEGABYTE + b"a" * _MEGABYTE + b"\r\n"
    passing = tuple(_passing())
    while True:
        await target.ask(path, ten)
        await target.send(target.head(path, None) + chunk * 10 + b"0\r\n\r\n")
        for route, body in passing:
            await target.ask(route, body)
        await asyncio.sleep(PAUSE_S)


def _passing() -> Iterator[tuple[str, bytes]]:
    text, ids = "/v1/completions", b"40," * (2 * _MEGABYTE)
    yield text, b'{"max_tokens":1,"prompt":"' + b"word " * (_MEGABYTE // 5) + b'"}'
    yield text, b'{"max_tokens":1,"prompt":"' + b"\\n" * (2 * _MEGABYTE - 50) + b'"}'
    yield text, b'{"max_tokens":1,"prompt":[' + ids[: 3 * ((4 * _MEGABYTE - 100) // 3)] + b"40]}"
    yield text, b'{"max_tokens":1,"prompt":[' + ids[: 3 << 16] + b"40]}"  # is answered
    said = b'{"role":"user","content":"a"},' * 1000
    yield "/v1/chat/completions", b'{"max_tokens":1,"messages":[' + said[:-1] + b"]}"  # is answered


async def large_messages(target: Target) -> None:
    """The same over gRPC: 10 MB, and what is within its limit and consists of a million parts."""
    number = baton_pb2.ChatRequest.DESCRIPTOR.fields_by_name["messages"].number
    generate = "/baton.v1.BatonService/Generate"
    sent = [
        (generate, baton_pb2.GenerateRequest(text="a" * (10 * _MEGABYTE)).SerializeToString()),
        (generate, baton_pb2.GenerateRequest(text="word " * (_MEGABYTE // 5)).SerializeToString()),
        (generate, _stops(_MEGABYTE).SerializeToString()),
        (generate, _stops(_MEGABYTE).SerializeToString()[:-1]),
        ("/baton.v1.BatonService/Chat", bytes([number << 3 | 2, 0]) * (2 * _MEGABYTE - 1)),
    ]
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"{target.host}:{target.grpc_port}", options=options) as channel:
        for path, message in itertools.cycle(sent):
            try:
                call: Any = channel.unary_stream(path)
                async for _ in call(message, timeout=ANSWER_S):
                    pass
                target.answers["OK"] += 1
            except grpc.aio.AioRpcError as error:
                target.answers[error.code().name] += 1
            await asyncio.sleep(PAUSE_S)


def _stops(texts: int) -> baton_pb2.GenerateRequest:
    return baton_pb2.GenerateRequest(text="a", sampling=baton_pb2.SamplingParams(stop=["x"] * texts))


async def slow_readers(target: Target) -> None:
    """Ask for long streams, repeated whole with every token, and read nothing."""
    body = json.dumps({"prompt": "a" * 4000, "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
    await asyncio.gather(*(_unread(target, target.head("/generate", len(body)) + body) for _ in range(8)))


async def half_open(target: Target) -> None:
    """Nothing at all, a head alone, or half of a body, and then nothing, or a reset."""
    head = target.head("/v1/completions", 1000)
    begun = (b"", head, head + b'{"prompt": "')
    held = [_held(target, begun[number % len(begun)]) for number in range(128)]
    await asyncio.gather(*held, *(_reset(target, begun[-1]) for _ in range(4)))


async def slow_loris(target: Target) -> None:
    """Heads that never end, a byte at a time."""
    await asyncio.gather(*(_drip(target) for _ in range(256)))


async def nothing(target: Target) -> None:
    await asyncio.Event().wait()


async def _held(target: Target, request: bytes) -> None:
    """Opened again whenever it is ended."""
    loop = asyncio.get_running_loop()
    while True:
        with await target.open() as made, suppress(ConnectionError):
            await loop.sock_sendall(made, request)
            while answer := await loop.sock_recv(made, 4096):
                if answer.startswith(_STATUS_LINE):  # the rest of it may come by itself
                    target.answers[_status(answer)] += 1
        target.answers["cut off"] += 1


async def _unread(target: Target, request: bytes) -> None:
    """Nothing is read for a while, and then whatever there is: a stream that was not ended meanwhile goes on."""
    loop = asyncio.get_running_loop()
    while True:
        with await target.open(receive_bytes=4096) as made:
            await loop.sock_sendall(made, request)
            await asyncio.sleep(UNREAD_S)
            outcome = "still streams"
            try:
                async with asyncio.timeout(PAUSE_S):
                    while await loop.sock_recv(made, _MEGABYTE):
                        continue
                outcome = "cut off"
            except ConnectionError:
                outcome = "cut off"
            except TimeoutError:
                pass
        target.answers[outcome] += 1


def _status(answer: bytes) -> str:
    return answer.split(b" ", 2)[1].decode() if answer.startswith(_STATUS_LINE) else "no HTTP"


async def _reset(target: Target, request: bytes) -> None:
    loop = asyncio.get_running_loop()
    while True:
        with await target.open() as made:
            await loop.sock_sendall(made, request)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        target.answers["reset by us"] += 1
        await asyncio.sleep(PAUSE_S)


async def _drip(target: Target) -> None:
    loop = asyncio.get_running_loop()
    while True:
        with await target.open() as made, suppress(ConnectionError):
            await loop.sock_sendall(made, b"POST /v1/completions HTTP/1.1\r\nx-slow: ")
            while True:
                await loop.sock_sendall(made, b"a")
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        answer = await loop.sock_recv(made, 4096)
                        target.answers[_status(answer) if answer else "cut off"] += 1
                        break


KINDS: Mapping[str, Abuse] = {
    each.__name__: each for each in (nothing, malformed, large, large_messages, slow_readers, half_open, slow_loris)
}


async def abuse(kind: str, host: str, port: int, grpc_port: int, seconds: float) -> Answers:
    target = Target(host, port, grpc_port)
    print("begun", flush=True)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await KINDS[kind](target)
    return target.answers


if __name__ == "__main__":
    name, address, http, rpc, length = sys.argv[1:]
    if hasattr(os, "SCHED_IDLE"):  # it stands for another machine: what is measured goes first on this one
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    print(json.dumps(asyncio.run(abuse(name, address, int(http), int(rpc), float(length)))))
