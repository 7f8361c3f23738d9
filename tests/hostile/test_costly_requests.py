"""Expensive requests: another client's stream and short requests must be served meanwhile."""

import asyncio
import ctypes
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from baton.protos import session_pb2
from tests.router.fake_worker import FakePair
from tests.router.http.conftest import HERMES_TEMPLATE, Gateway
from tests.router.tokenizers_for_tests import END, byte_level

MEMORY_BYTES = 64 << 20  # growth of the process that is allowed after an attack
PEAK_BYTES = 256 << 20  # growth that is allowed during it, which includes the attacker's request bodies
PACE_S = 0.01  # between the neighbour's tokens
QUIET_TOKENS = 100
WAIT_S = 60.0
CONTEXT_TOKENS = 1 << 17
FAMILY = "👨‍👩‍👧‍👦‍"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TEMPLATE = (
    "{% if messages[0].content == 'for ever' %}"
    "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if messages[0].content == 'huge' %}{% set a = 'a' %}{{ a * 1500000000 }}{% endif %}" + HERMES_TEMPLATE
)
Attack = Callable[[Gateway], Awaitable[None]]


@pytest.fixture
async def hostile_pair(pair: FakePair, tmp_path: Path) -> FakePair:
    """Workers of a model with a long context and a costly chat template."""
    (tmp_path / "tiny" / "chat_template.jinja").write_text(TEMPLATE)
    for worker in (pair.prefill, pair.decode):
        worker.info.model.max_model_len = CONTEXT_TOKENS
        worker.info.total_blocks = worker.report.limit_blocks = CONTEXT_TOKENS
    return pair


async def loops(gateway: Gateway) -> None:
    for error in await refusals(gateway, CHAT, 1, messages=[{"role": "user", "content": "for ever"}]):
        assert "CPU time" in error["message"]


async def grows(gateway: Gateway) -> None:
    for error in await refusals(gateway, CHAT, 3, messages=[{"role": "user", "content": "huge"}]):
        assert "1024 MiB" in error["message"]


async def joins_emoji(gateway: Gateway) -> None:
    await refusals(gateway, COMPLETION, 10, prompt=FAMILY * (1_000_000 // len(FAMILY.encode())))


async def writes_much(gateway: Gateway) -> None:
    await refusals(gateway, COMPLETION, 10, prompt="word " * 190_000)


async def asks_forms(gateway: Gateway) -> None:
    await refusals(gateway, COMPLETION, 1, prompt="a", guided_regex="(((a{1000}){1000}){1000}){1000}")


async def refusals(gateway: Gateway, path: str, count: int, **body: Any) -> list[Any]:
    """Send the same request `count` times at once; return the errors."""
    return await asyncio.gather(*(gateway.refused(path, 400, max_tokens=2, **body) for _ in range(count)))


@dataclass
class Neighbour:
    """Client with a stream whose tokens come at a steady pace."""

    gateway: Gateway
    gaps_s: list[float] = field(default_factory=list)
    received: str = ""
    sent: int = 0

    async def read(self) -> None:
        """Read the stream to its end."""
        body = {"prompt": "go", "max_tokens": 60_000, "stream": True}
        async with self.gateway.client.stream("POST", COMPLETION, json=body) as response:
            before_s: float | None = None
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self.received += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    now = time.monotonic()
                    if before_s is not None:
                        self.gaps_s.append(now - before_s)
                    before_s = now
            assert line == "" or line == "data: [DONE]"

    async def speak(self, stop: asyncio.Event) -> None:
        """Send the tokens of the stream, as its decode worker."""
        prefill = await self.gateway.pair.prefill.received("prefill")
        letter = byte_level().encode("x").ids
        while not stop.is_set():
            await asyncio.sleep(PACE_S)
            begin = self.sent  # the first token is sent twice: by the prefill and by the decode worker
            self.sent += 1 if begin else 2
            self.gateway.pair.step(prefill.attempt_id, begin, letter * (self.sent - begin))
        end = [byte_level().token_to_id(END)]
        self.gateway.pair.step(prefill.attempt_id, self.sent, end, session_pb2.END_REASON_STOP)


def resident_bytes() -> int:
    """Return the resident memory without freed memory, whose amount depends on the timing of threads."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def p99_ms(gaps_s: list[float]) -> float:
    return sorted(gaps_s)[len(gaps_s) * 99 // 100] * 1e3


@pytest.mark.parametrize("attack", [loops, grows, joins_emoji, writes_much, asks_forms])
async def test_neighbour_of_a_costly_client_is_served_to_its_end(
    hostile_pair: FakePair, gateway: Gateway, attack: Attack, hostile_s: float
) -> None:
    gateway.says("x" * 9)
    hostile_pair.limits = [1]  # the tokens of the first answer, the stream, are sent by the test
    neighbour, stop = Neighbour(gateway), asyncio.Event()
    reading, speaking = asyncio.create_task(neighbour.read()), asyncio.create_task(neighbour.speak(stop))
    async with asyncio.timeout(WAIT_S):
        while len(neighbour.gaps_s) < QUIET_TOKENS:
            await asyncio.sleep(PACE_S)
    quiet, before_bytes, began_s = len(neighbour.gaps_s), resident_bytes(), time.monotonic()
    answered, most_bytes, rounds = 0, before_bytes, 0
    while not rounds or time.monotonic() - began_s < hostile_s:
        attacking, rounds = asyncio.ensure_future(attack(gateway)), rounds + 1
        while not attacking.done():
            body = await gateway.post(CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=2)
            assert body["choices"][0]["message"]["content"] == "xx"
            answered += not attacking.done()
            most_bytes = max(most_bytes, resident_bytes())
        await attacking
    stop.set()
    await asyncio.wait_for(asyncio.gather(reading, speaking), WAIT_S)
    assert neighbour.received == "x" * neighbour.sent
    assert most_bytes - before_bytes < PEAK_BYTES
    assert resident_bytes() - before_bytes < MEMORY_BYTES
    quiet_ms, beside_ms = p99_ms(neighbour.gaps_s[:quiet]), p99_ms(neighbour.gaps_s[quiet:])
    print(
        f"{attack.__name__}: {time.monotonic() - began_s:.1f} s, {answered} short answers, p99 between tokens "
        f"{quiet_ms:.0f} ms quiet and {beside_ms:.0f} ms beside it, {(most_bytes - before_bytes) >> 20} MiB more"
    )
    assert beside_ms < 5_000
