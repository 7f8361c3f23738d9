"""Clients that mean no good, each kind in its way, until they are told to end: `python -m benchmarks.clients.abusers`.

KIND HOST PORT SECONDS. Says `begun` when it has, and at its end what it was answered, as JSON: how often each status,
`cut off` where a connection was ended without one.
"""

import asyncio
import itertools
import json
import socket
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress

Told = Counter[str]
Abuse = Callable[["Target"], Awaitable[None]]

PAUSE_S = 0.02
UNREAD_S = 4.0  # longer than abuse.LIMITS allow
ANSWER_S = 60.0
_MEGABYTE = 1 << 20


class Target:
    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.told: Told = Counter()

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
            # Whoever is refused early may not get rid of the rest: the answer is there all the same.
            with suppress(ConnectionError):
                await loop.sock_sendall(made, request)
            try:
                async with asyncio.timeout(ANSWER_S):
                    answer = await loop.sock_recv(made, 4096)
            except (ConnectionError, TimeoutError):
                answer = b""
        self.told[_status(answer) if answer else "cut off"] += 1


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
    """Prompts of 10 MB, with their length told and without, and such as just pass for a body and are still too long."""
    ten, path = b'{"prompt":"' + b"a" * (10 * _MEGABYTE) + b'"}', "/v1/completions"
    chunk = b"%x\r\n" % _MEGABYTE + b"a" * _MEGABYTE + b"\r\n"
    million = b'{"max_tokens":1,"prompt":"' + b"word " * (_MEGABYTE // 5) + b'"}'
    while True:
        await target.ask(path, ten)
        await target.send(target.head(path, None) + chunk * 10 + b"0\r\n\r\n")
        await target.ask(path, million)
        await asyncio.sleep(PAUSE_S)


async def slow_readers(target: Target) -> None:
    """Ask for long streams, repeated whole with every token, and read nothing."""
    body = json.dumps({"prompt": "a" * 4000, "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
    await asyncio.gather(*(_unread(target, target.head("/generate", len(body)) + body) for _ in range(8)))


async def half_open(target: Target) -> None:
    """Half of a request, and then nothing, or a reset."""
    half = target.head("/v1/completions", 1000) + b'{"prompt": "'
    held = [_held(target, half) for _ in range(128)]
    await asyncio.gather(*held, *(_reset(target, half) for _ in range(4)))


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
                target.told[_status(answer)] += 1
        target.told["cut off"] += 1


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
        target.told[outcome] += 1


def _status(answer: bytes) -> str:
    return answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP/1.1 ") else "more of an answer"


async def _reset(target: Target, request: bytes) -> None:
    loop = asyncio.get_running_loop()
    while True:
        with await target.open() as made:
            await loop.sock_sendall(made, request)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        target.told["reset by us"] += 1
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
                        target.told[_status(answer) if answer else "cut off"] += 1
                        break


KINDS: Mapping[str, Abuse] = {
    each.__name__: each for each in (nothing, malformed, large, slow_readers, half_open, slow_loris)
}


async def abuse(kind: str, host: str, port: int, seconds: float) -> Told:
    target = Target(host, port)
    print("begun", flush=True)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await KINDS[kind](target)
    return target.told


if __name__ == "__main__":
    name, address, number, length = sys.argv[1:]
    print(json.dumps(asyncio.run(abuse(name, address, int(number), float(length)))))
