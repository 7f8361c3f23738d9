"""A gateway with fake workers, and what its clients saw beside what metrics, traces and status say of it."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc
import httpx2
from prometheus_client.parser import text_string_to_metric_families

from baton.process.telemetry.spans import SpanKind
from baton.protos import admin_pb2, admin_pb2_grpc, baton_pb2, baton_pb2_grpc
from tests.router.conftest import RecordingTelemetry, encode, running_router
from tests.router.fake_worker import FakePair
from tests.router.http.conftest import CLIENT_S, WAIT_S, ObservedGateway

PROMPT = "hello"
PROMPT_TOKENS = len(PROMPT)


class Seen(NamedTuple):
    """A request as its client saw it. `given_tokens`: of the prompt, where a worker was given it."""

    outcome: str
    reason: str = ""
    given_tokens: int = 0
    tokens: int = 0
    traced: bool = True


class Totals(NamedTuple):
    """All requests, as one of the interfaces of the router counts them."""

    ended: Counter[tuple[str, str]]
    prompt_tokens: int
    generated_tokens: int


@dataclass
class OutcomeWorld:
    process: ObservedGateway
    pair: FakePair
    http: httpx2.AsyncClient
    channel: grpc.aio.Channel
    stub: Any
    admin: Any
    telemetry: RecordingTelemetry
    headers: dict[str, str] = field(default_factory=dict)

    async def metrics(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """By name and the values of labels, in the order of their names."""
        text = (await self.http.get("/metrics", headers=self.headers)).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {(s.name, tuple(s.labels[name] for name in sorted(s.labels))): s.value for s in samples}

    async def status(self) -> Any:
        metadata = tuple(self.headers.items())
        return await self.admin.GetStatus(admin_pb2.GetStatusRequest(), metadata=metadata)

    async def check(self, *seen: Seen, running: int = 0) -> None:
        """All faces tell what the clients saw, of the requests that have ended and of those that run."""
        ended = Counter((each.outcome, each.reason) for each in seen if each.outcome)
        wanted = Totals(ended, sum(each.given_tokens for each in seen), sum(each.tokens for each in seen))
        traced = sum(each.traced and bool(each.outcome) for each in seen)
        with suppress(TimeoutError):  # messages are on their way; what is still missing fails below
            async with asyncio.timeout(WAIT_S):
                while self._by_status(status := await self.status()) != wanted or len(self._roots) < traced:
                    await asyncio.sleep(0)
        assert self._by_status(status) == wanted, (self._by_status(status), wanted)
        assert status.active_requests == running
        assert await self._by_metrics(running) == wanted
        assert Counter(self._by_traces()) == Counter(each[:4] for each in seen if each.outcome and each.traced)
        totals = status.requests
        assert totals.started == sum(each.count for each in totals.ended) + status.active_requests

    @property
    def _roots(self) -> list[Any]:
        return [span for span in self.telemetry.spans if span.kind is SpanKind.SERVER]

    def _by_status(self, status: Any) -> Totals:
        totals = status.requests
        ended = Counter({(each.outcome, each.reason): each.count for each in totals.ended})
        return Totals(ended, totals.prompt_tokens, totals.generated_tokens)

    async def _by_metrics(self, running: int) -> Totals:
        metrics = await self.metrics()
        ended = {
            labels: round(value) for (name, labels), value in metrics.items() if name == "baton:requests_ended_total"
        }
        assert metrics["baton:active_requests", ()] == running
        assert metrics["baton:requests_started_total", ()] == sum(ended.values()) + running
        prompt = sum(value for (name, _), value in metrics.items() if name == "vllm:prompt_tokens_total")
        generated = sum(value for (name, _), value in metrics.items() if name == "vllm:generation_tokens_total")
        return Totals(Counter({(o, r): count for (o, r), count in ended.items()}), round(prompt), round(generated))

    def _by_traces(self) -> list[tuple[str, str, int, int]]:
        traces = []
        for shown in (root.attributes for root in self._roots):
            given = shown["baton.attempts"] and not shown.get("baton.resumed")
            prompt_tokens = shown["gen_ai.usage.input_tokens"] if given else 0
            made = shown.get("gen_ai.usage.output_tokens", 0)
            traces.append((shown["baton.outcome"], shown["baton.reason"], prompt_tokens, made))
        return traces

    # Requests.

    def generate(self, text: str = PROMPT, key: str = "", timeout: float = WAIT_S, **sampling: Any) -> Any:
        """A call over gRPC."""
        message = baton_pb2.GenerateRequest(text=text, sampling=baton_pb2.SamplingParams(**sampling))
        metadata = (("authorization", f"Bearer {key}"),) if key else None
        return self.stub.Generate(message, timeout=timeout, metadata=metadata)

    def resume(self, started: Any, received: str, **sampling: Any) -> Any:
        """The same request, whose client has that much of its answer."""
        has = baton_pb2.ReceivedChoice(token_ids=encode(received), text_bytes=len(received))
        again = baton_pb2.GenerateRequest(text=PROMPT, sampling=baton_pb2.SamplingParams(seed=started.seed, **sampling))
        known = {"request_id": started.request_id, "resume_token": started.resume_token}
        return self.stub.Resume(baton_pb2.ResumeRequest(choices=[has], generate=again, **known), timeout=WAIT_S)

    async def refused(self, call: Any) -> grpc.StatusCode:
        """The code that a call over gRPC ends with."""
        try:
            while await call.read() is not grpc.aio.EOF:
                continue
        except grpc.aio.AioRpcError as error:
            return error.code()
        raise AssertionError("it ended well")

    async def refused_over_http(self, path: str = "/v1/completions", status: int = 400, **sent: Any) -> None:
        response = await self.http.post(path, headers=self.headers, **sent)
        assert response.status_code == status, response.text

    async def attempt(self, number: int = 1) -> int:
        """Of the `number`-th request that came to the workers."""
        command = await self.pair.prefill.received("prefill", number)
        return int(command.attempt_id)

    @asynccontextmanager
    async def streamed(self, **body: Any) -> AsyncIterator[AsyncIterator[int]]:
        """A streamed completion over HTTP: how many tokens each chunk has. Leaving it early closes the connection."""
        given = {"prompt": PROMPT, "max_tokens": 50, "stream": True, "return_token_ids": True, **body}
        async with self.http.stream("POST", "/v1/completions", json=given, headers=self.headers) as response:
            assert response.status_code == 200
            yield (_tokens(line) async for line in response.aiter_lines() if line.startswith("data: {"))

    async def full(self) -> None:
        """Returns when the router knows that there is no room."""
        self.pair.decode.report.limit_slots = 0
        async with asyncio.timeout(WAIT_S):
            while any(worker.report.limit_slots for worker in (await self.status()).workers):
                await asyncio.sleep(0)

    async def queued(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while (await self.status()).queued_requests != count:
                await asyncio.sleep(0)

    async def say_of_two(self) -> None:
        """Of a request that comes, two tokens of each of two choices."""
        attempt_id = await self.attempt()
        self.first(attempt_id, choices=2)
        for choice in (0, 1):
            self.pair.step(attempt_id, 1, encode("b"), choice=choice)

    def first(self, attempt_id: int, text: str = "a", choices: int = 1) -> None:
        self.pair.first_step(attempt_id, encode(text) * choices)


def _tokens(line: str) -> int:
    return sum(len(choice.get("token_ids") or ()) for choice in json.loads(line[6:])["choices"])


@asynccontextmanager
async def outcome_world(pair: FakePair, **settings: Any) -> AsyncIterator[OutcomeWorld]:
    """Ready, and its workers answer by their script until they are `manual`."""
    headers = {"authorization": f"Bearer {settings.pop('boss')}"} if "boss" in settings else {}
    telemetry = RecordingTelemetry()
    async with running_router(ObservedGateway, pair, {"reflection": False} | settings, telemetry) as process:
        public, admin = process.running.ports
        url = f"http://127.0.0.1:{process.http_port}"
        async with (
            httpx2.AsyncClient(base_url=url, timeout=CLIENT_S, trust_env=False, verify=False) as http,
            grpc.aio.insecure_channel(f"127.0.0.1:{public}") as channel,
            grpc.aio.insecure_channel(f"127.0.0.1:{admin}") as admin_channel,
        ):
            await http.get("/v1/models", headers=headers)  # waits until it is ready
            stub, admin_stub = baton_pb2_grpc.BatonServiceStub(channel), admin_pb2_grpc.AdminServiceStub(admin_channel)
            yield OutcomeWorld(process, pair, http, channel, stub, admin_stub, telemetry, headers)
