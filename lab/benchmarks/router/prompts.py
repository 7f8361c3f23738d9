"""What a long conversation's next turn costs the router before it is placed: messages to tokens and block names.

    .venv/bin/python -m baton.lab.benchmarks.router.prompts [--model FOLDER] [--turns 20] [--seconds 10] [--json FILE]

Conversations of pages of the documentation take turns and grow by an answer and a question at a time. Each prompt is
prepared as the router does it, knowing the earlier ones. After each round one of them is prepared afresh: rendered,
tokenised and hashed whole; tokens and names are compared. Time is CPU time of this process, all threads. At the end,
streams run through a router on a core of its own, with and without such turns beside them, in windows that take turns.
"""

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import grpc

from baton.lab.benchmarks.report.result import DEMO, Columns, read_arguments, table, write_result
from baton.lab.benchmarks.report.statistics import percentile
from baton.lab.benchmarks.router.streams import GENERATE_METHOD, generate, serving
from baton.launch.paths import ROOT
from baton.process.registry.worker_record import WorkerRole
from baton.protos import baton_pb2
from baton.router.model.chat_template import ChatTemplate
from baton.router.model.served_model import ServedModel, load_served_model
from baton.router.model.validation import Drawn, validate
from baton.router.types.request import (
    ChatPrompt,
    GenerationRequest,
    Message,
    Operation,
    PreparedRequest,
    RequestedSampling,
)
from baton.router.types.worker import ModelDescription, WorkerDescription
from baton.text.block_hash import block_hashes

CONTEXT_TOKENS, VOCABULARY, BLOCK_TOKENS = 1 << 20, 1 << 20, 32
KNOWN_BYTES = 256 << 20
KNOWN_TOKENS = (25_000, 50_000, 100_000, 200_000)
NEW_TOKENS = (0, 250, 1000, 4000)
USUAL_KNOWN, USUAL_NEW = 100_000, 1000
CONVERSATIONS = 4


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU milliseconds, medians over turns."""

    known_tokens: int
    new_tokens: int  # as measured, mean
    prepare_ms: float  # all of it
    render_ms: float  # of that, messages to text
    fresh_ms: float  # all of it, knowing nothing
    read_again_tokens: int  # of the known ones, mean

    @property
    def requests_per_s(self) -> float:
        """Of one core."""
        return 1e3 / self.prepare_ms

    @property
    def ratio(self) -> float:
        return self.fresh_ms / self.prepare_ms


class Conversation:
    """Messages of pages of text, as many as are asked for. Begins with two short ones."""

    def __init__(self, template: ChatTemplate, text: str, characters_per_token: float, seed: int) -> None:
        self._template = template
        self._text = text
        self._per_token = characters_per_token
        self._draw = random.Random(seed)
        self.messages = [Message(role, self._page(500)) for role in ("system", "user")]

    @classmethod
    async def begin(cls, served: ServedModel, seed: int) -> Self:
        """Raises: RuntimeError for a model without a chat template."""
        template = served.tokenizer.chat_template
        if template is None:
            raise RuntimeError("this needs a model with a chat template")
        text = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
        return cls(template, text, len(text) / len(await served.tokenizer.encode(text, False)), seed)

    def _page(self, characters: int) -> str:
        begin = self._draw.randrange(len(self._text) - characters)
        return self._text[begin : begin + characters]

    def grow(self, tokens: int) -> None:
        """By an answer and a question at a time, of 500 tokens or less each."""
        while tokens > 0:
            size = min(tokens, 1000)
            for role in ("assistant", "user"):
                self.messages.append(Message(role, self._page(round(size * self._per_token / 2))))
            tokens -= size

    async def render(self) -> str:
        return await self._template.render(self.messages)

    async def turns(self) -> AsyncIterator[bytes]:
        """Requests that each add another question to the same conversation, as text."""
        sampling = baton_pb2.SamplingParams(max_tokens=1)
        while True:
            question = Message("user", self._page(round(USUAL_NEW * self._per_token)))
            text = await self._template.render([*self.messages, question])
            yield baton_pb2.GenerateRequest(text=text, sampling=sampling).SerializeToString()

    @property
    def request(self) -> GenerationRequest:
        return GenerationRequest(
            Operation.CHAT, ChatPrompt(tuple(self.messages)), sampling=RequestedSampling(max_tokens=1)
        )


async def measure(served: ServedModel, known_tokens: int, new_tokens: int, turns: int) -> Cost:
    """Raises: RuntimeError where a prompt differs from that of a fresh tokenisation."""
    seed = known_tokens + new_tokens
    conversations = [await Conversation.begin(served, seed + number) for number in range(CONVERSATIONS)]
    lengths = []
    for conversation in conversations:
        conversation.grow(known_tokens)
        lengths.append(len((await _prepare(served, conversation.request)).token_ids))
    reader = served.tokenizer.reader
    prepare, render, fresh, new, again = list[float](), list[float](), list[float](), list[int](), list[int]()
    for turn in range(turns):
        for number, conversation in enumerate(conversations):
            conversation.grow(new_tokens)
            request, read = conversation.request, reader.read_tokens
            began_s = time.process_time()
            prepared = await _prepare(served, request)
            prepare.append(time.process_time() - began_s)
            new.append(len(prepared.token_ids) - lengths[number])
            again.append(reader.read_tokens - read - new[-1])
            lengths[number] = len(prepared.token_ids)
            if number == turn % CONVERSATIONS:
                checked, checked_prompt = conversation, prepared
        began_s = time.process_time()
        token_ids = await served.tokenizer.prompt_tokens(checked_prompt.valid.prompt)
        names = block_hashes(checked_prompt.cache_root, token_ids, served.block_tokens)
        fresh.append(time.process_time() - began_s)
        began_s = time.process_time()
        await checked.render()
        render.append(time.process_time() - began_s)
        if (token_ids, names) != (checked_prompt.token_ids, checked_prompt.block_hashes):
            raise RuntimeError("a prompt was not read as if afresh")
    return Cost(
        known_tokens,
        round(statistics.mean(new)),
        prepare_ms=statistics.median(prepare) * 1e3,
        render_ms=statistics.median(render) * 1e3,
        fresh_ms=statistics.median(fresh) * 1e3,
        read_again_tokens=round(statistics.mean(again)),
    )


async def _prepare(served: ServedModel, request: GenerationRequest) -> PreparedRequest:
    drawn = Drawn("benchmark", 1)
    return await served.prepare(validate(request, served.defaults, served.vocab_size, served.max_model_len, drawn))


def serve_model(folder: Path) -> ServedModel:
    model = ModelDescription("benchmark", str(folder), CONTEXT_TOKENS, VOCABULARY, "float32", BLOCK_TOKENS)
    description = WorkerDescription("worker", WorkerRole.DECODE, 1, bytes(32), model, 1, 1)
    return load_served_model(description, folder, None, KNOWN_BYTES)


async def measure_costs(folder: Path, turns: int) -> list[Cost]:
    served = serve_model(folder)
    points = [(known, USUAL_NEW) for known in KNOWN_TOKENS] + [
        (USUAL_KNOWN, new) for new in NEW_TOKENS if new != USUAL_NEW
    ]
    try:
        return [await measure(served, known, new, turns) for known, new in points]
    finally:
        served.close()


COLUMNS: Columns[Cost] = {
    "known": lambda cost: f"{cost.known_tokens:,}",
    "new": lambda cost: f"{cost.new_tokens:,}",
    "read again": lambda cost: f"{cost.read_again_tokens:,}",
    "CPU ms": lambda cost: f"{cost.prepare_ms:.2f}",
    "of it template": lambda cost: f"{cost.render_ms:.2f}",
    "afresh": lambda cost: f"{cost.fresh_ms:.1f}",
    "times": lambda cost: f"{cost.ratio:.1f}",
    "a second, one core": lambda cost: f"{cost.requests_per_s:,.0f}",
}


STREAMS, INTERVAL_MS, SETTLE_S, READY_S = 8, 20.0, 1.0, 30.0
STREAM_TOKENS = 100_000
RATES_PER_S = (0.0, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class Gaps:
    """Between two tokens of the streams, in milliseconds, at their client."""

    asked_per_s: float
    prompts_per_s: float  # that were answered beside the streams
    first_token_ms: float  # of those, median; 0 without any
    p50_ms: float
    p99_ms: float
    count: int


class Client:
    """Follows the streams, and asks beside them."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.aio.insecure_channel(target)
        self._beside = grpc.aio.insecure_channel(target, options=(("baton.bench.channel", 1),))
        self._streams: list[asyncio.Task[None]] = []
        self._began_s = 0.0
        self._gaps_ms: list[float] = []
        self._begun = 0
        self._draw = random.Random(0)
        self._all_begun = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._streams = [asyncio.create_task(self._follow()) for _ in range(STREAMS)]
        async with asyncio.timeout(READY_S):
            await self._all_begun.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)
        await self._channel.close()
        await self._beside.close()

    async def ask(self, request: bytes) -> float:
        """Milliseconds to the first message of an answer of one token."""
        began_s, took_ms = time.monotonic(), 0.0
        asked: Any = self._beside.unary_stream(GENERATE_METHOD)
        async for _ in asked(request):
            took_ms = took_ms or (time.monotonic() - began_s) * 1e3
        return took_ms

    async def window(
        self, seconds: float, per_s: float, requests: AsyncIterator[bytes]
    ) -> tuple[list[float], list[float]]:
        """Gaps between tokens, and the times of the requests beside them."""
        await asyncio.sleep(SETTLE_S)
        self._began_s, self._gaps_ms = time.monotonic(), []
        asked = list[asyncio.Task[float]]()
        for number in range(round(seconds * per_s)):
            due_s = self._began_s + (number + self._draw.random()) / per_s  # not in step with the streams
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            asked.append(asyncio.create_task(self.ask(await anext(requests))))
        await asyncio.sleep(max(0.0, self._began_s + seconds - time.monotonic()))
        gaps_ms, self._gaps_ms = self._gaps_ms, []
        return gaps_ms, await asyncio.gather(*asked)

    async def _follow(self) -> None:
        last_s = None
        asked: Any = self._channel.unary_stream(GENERATE_METHOD)
        async for _ in asked(generate(STREAM_TOKENS)):
            now = time.monotonic()
            if last_s is None:
                self._begun += 1
                if self._begun == STREAMS:
                    self._all_begun.set()
            elif last_s >= self._began_s:
                self._gaps_ms.append((now - last_s) * 1e3)
            last_s = now


async def measure_gaps(folder: Path, seconds: float, rounds: int) -> list[Gaps]:
    """By prompts per second beside the streams, in windows that take turns."""
    served = serve_model(folder)
    conversation = await Conversation.begin(served, seed=1)
    conversation.grow(USUAL_KNOWN)
    requests = conversation.turns()
    gaps_ms: dict[float, list[float]] = {rate: [] for rate in RATES_PER_S}
    first_ms: dict[float, list[float]] = {rate: [] for rate in RATES_PER_S}
    with TemporaryDirectory(prefix="baton-bench-") as name:
        (Path(name) / "tiny").symlink_to(folder)
        async with serving(Path(name), INTERVAL_MS) as stack, Client(stack.target) as client:
            await client.ask(await anext(requests))
            for number in range(rounds * len(RATES_PER_S)):
                rate = RATES_PER_S[number % len(RATES_PER_S)]
                found, asked = await client.window(seconds, rate, requests)
                gaps_ms[rate] += found
                first_ms[rate] += asked
    served.close()
    return [
        Gaps(
            rate, len(first_ms[rate]) / (rounds * seconds), statistics.median(first_ms[rate] or [0.0]),
            percentile(gaps_ms[rate], 50), percentile(gaps_ms[rate], 99), len(gaps_ms[rate]),
        )
        for rate in RATES_PER_S
    ]  # fmt: skip


GAP_COLUMNS: Columns[Gaps] = {
    "prompts a second beside": lambda gaps: f"{gaps.prompts_per_s:.1f}",
    "their first message ms": lambda gaps: f"{gaps.first_token_ms:.1f}",
    "gap p50 ms": lambda gaps: f"{gaps.p50_ms:.2f}",
    "p99": lambda gaps: f"{gaps.p99_ms:.2f}",
    "gaps": lambda gaps: f"{gaps.count:,}",
}


def main() -> None:
    asked = read_arguments(
        __doc__,
        model=(DEMO, "folder with a tokenizer and a chat template"),
        turns=(20, "of each conversation"),
        seconds=(10.0, "of each window with streams; 0: none"),
        rounds=(3, "of windows"),
    )
    folder = asked.model.resolve()
    costs = asyncio.run(measure_costs(folder, asked.turns))
    print(table(costs, COLUMNS))
    gaps = asyncio.run(measure_gaps(folder, asked.seconds, asked.rounds)) if asked.seconds else []
    if gaps:
        print(f"\n{STREAMS} streams with a token every {INTERVAL_MS:g} ms, and prompts of {USUAL_KNOWN:,} known tokens "
              f"and {USUAL_NEW:,} new ones:\n{table(gaps, GAP_COLUMNS)}")  # fmt: skip
    rows = [{**asdict(cost), "requests_per_s": cost.requests_per_s, "ratio": cost.ratio} for cost in costs]
    write_result(asked.json, {"costs": rows, "gaps": [asdict(each) for each in gaps]})


if __name__ == "__main__":
    main()
