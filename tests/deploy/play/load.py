"""Continuous streams over gRPC and HTTP while pods change; some answers are compared with quiet ones afterwards."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import httpx2

from baton.client import BatonClientError, Delta
from tests.deploy.play.entry import Entry

TOKENS, COMPARED = 200, 40


@dataclass(frozen=True, slots=True)
class Stream:
    way: str  # gRPC or HTTP
    prompt: str
    text: str
    took_s: float
    longest_gap_s: float  # between two pieces of it
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Compared:
    compared: int  # streams whose prompt was answered once more, without load
    different: int  # of those


@dataclass
class Load:
    """Clients over gRPC and HTTP, one stream after another. Every prompt is new, so that KV is transferred."""

    entry: Entry
    target: str
    """Name of all routers for gRPC clients."""
    ready_routers: Callable[[], Sequence[str]]
    """Returns the HTTP host:port of each router that gets new connections."""
    clients: int = 4
    streams: list[Stream] = field(default_factory=list)
    _over: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    def start(self) -> None:
        for number in range(self.clients):
            work = self._over_grpc(number) if number % 2 else self._over_http(number)
            self._tasks.append(asyncio.create_task(work))

    async def stop(self) -> None:
        """Stop after the open streams."""
        self._over.set()
        await asyncio.gather(*self._tasks)

    async def compare(self) -> Compared:
        """Repeat prompts of streams from the complete run without load."""
        whole = [stream for stream in self.streams if not stream.failure]
        chosen = whole[:: max(1, len(whole) // COMPARED)]
        async with self.entry.grpc(self.target) as baton:
            again = [await baton.complete(each.prompt, max_tokens=TOKENS, ignore_eos=True) for each in chosen]
        pairs = zip(chosen, again, strict=True)
        return Compared(len(chosen), sum(stream.text != answer.choices[0].text for stream, answer in pairs))

    async def _over_grpc(self, client: int) -> None:
        async with self.entry.grpc(self.target) as baton:
            while not self._over.is_set():
                watch, prompt = _Watch("gRPC"), self._prompt(client)
                try:
                    async with aclosing(baton.generate(prompt, max_tokens=TOKENS, ignore_eos=True)) as events:
                        async for event in events:
                            if isinstance(event, Delta):
                                watch.piece(event.text, len(event.token_ids))
                    self.streams.append(watch.end(prompt))
                except BatonClientError as error:
                    self.streams.append(watch.end(prompt, f"{type(error).__name__}: {error}"))

    async def _over_http(self, client: int) -> None:
        turn = client
        while not self._over.is_set():
            routers = self.ready_routers()
            turn += 1
            watch, prompt = _Watch("HTTP"), self._prompt(client)
            try:
                await self._http_stream(routers[turn % len(routers)], prompt, watch)
                self.streams.append(watch.end(prompt))
            except (httpx2.HTTPError, ValueError) as error:
                self.streams.append(watch.end(prompt, f"{type(error).__name__}: {error}"))

    async def _http_stream(self, router: str, prompt: str, watch: "_Watch") -> None:
        """Read a stream. Raises: httpx2.HTTPError, ValueError for an incomplete answer."""
        body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
        address, finish = self.entry.address(router, "/v1/completions"), ""
        async with (
            self.entry.http() as http,
            http.stream("POST", address, json=body | {"model": "tableqa"}) as answer,
        ):
            if answer.status_code != 200:
                raise ValueError(f"status {answer.status_code}: {(await answer.aread())[:200]!r}")
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if line.startswith("data: ") and data != "[DONE]":
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise ValueError(f"an error in the stream: {data[:200]}")
                    for choice in chunk["choices"]:
                        watch.piece(choice["text"], 0)
                        finish = choice["finish_reason"] or finish
        if finish != "length":
            raise ValueError(f"the stream ended as {finish!r}")

    def _prompt(self, client: int) -> str:
        """Return a prompt of about 150 tokens that no cache has."""
        place = len(self.streams)
        rows = "\n".join(f"| {row} | Name {place * 31 + row} {client} | {20 + row} | Pilot |" for row in range(1, 9))
        return f"| ID | Name | Age | Occupation |\n|----|------|-----|------------|\n{rows}\nHow old is Name {client}?"


class _Watch:
    def __init__(self, way: str) -> None:
        self._way, self._began = way, time.monotonic()
        self._texts: list[str] = []
        self._last: float | None = None
        self._gap_s, self._tokens = 0.0, 0

    def piece(self, text: str, tokens: int) -> None:
        now = time.monotonic()
        if self._last is not None:
            self._gap_s = max(self._gap_s, now - self._last)
        self._last = now
        self._texts.append(text)
        self._tokens += tokens

    def end(self, prompt: str, failure: str = "") -> Stream:
        if not failure and self._way == "gRPC" and self._tokens != TOKENS:
            failure = f"{self._tokens} tokens instead of {TOKENS}"
        took_s = time.monotonic() - self._began
        return Stream(self._way, prompt, "".join(self._texts), took_s, self._gap_s, failure)
