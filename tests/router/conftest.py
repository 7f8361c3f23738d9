"""A real router with fake workers, all in this process, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.process.helper import Helper
from baton.process.serving import watchdog
from baton.process.telemetry.spans import FinishedSpan, Telemetry
from baton.process.telemetry.trace_context import TraceContext, new_trace
from baton.protos import admin_pb2, admin_pb2_grpc, baton_pb2, baton_pb2_grpc, session_pb2
from baton.router.config import RouterConfig
from baton.router.model import chat_template
from baton.router.model.template_process import CPU_S
from baton.router.request.attempt import Tries
from tests.fixtures.routed import Observed, ObservedRouter, serving_router
from tests.router.fake_worker import FakePair, FakeWorker, worker_info
from tests.router.tokenizers_for_tests import byte_level, write_model_folder

READY_S = 60.0  # on a busy machine


class SharedTemplates:
    """The template processes of all tests, which outlive the model that asks them: a start takes as long as a test."""

    def __init__(self, helper: Helper) -> None:
        self.ask, self.ask_here = helper.ask, helper.ask_here

    def close(self) -> None:
        """Leave the processes to the next test."""


@pytest.fixture(scope="session", autouse=True)
def cheap_start() -> Iterator[None]:
    """Routers in this process start without processes of their own, for templates and beside the watchdog."""
    shared = Helper(chat_template.MODULE, str(CPU_S), processes=chat_template.PROCESSES, limit_s=chat_template.WALL_S)

    def helper(module: str, cpu_s: str, **options: Any) -> Helper | SharedTemplates:
        return SharedTemplates(shared) if cpu_s == str(CPU_S) else Helper(module, cpu_s, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template, "Helper", helper)
        patch.setattr(watchdog, "_Sibling", lambda bound_s, period_s: None)
        yield
    shared.close()


@pytest.fixture(scope="module")
def no_pauses() -> Iterator[None]:
    """Attempts at a request follow each other at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tries, "pause_s", lambda self, reason, turn: 0.0)
        yield


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as running:
        yield running


@dataclass
class RecordingTelemetry:
    spans: list[FinishedSpan] = field(default_factory=list)

    def span(self, span: FinishedSpan) -> TraceContext:
        self.spans.append(span)
        return span.identity or new_trace()

    def close(self) -> None:
        pass


@asynccontextmanager
async def running_router(
    kind: type[Observed], pair: FakePair, settings: dict[str, Any], telemetry: Telemetry
) -> AsyncIterator[Observed]:
    """A router of these workers from when it listens until it has stopped."""
    fields: dict[str, Any] = {"port": 0, "admin_port": 0, "http_port": 0, "workers": pair.addresses, "drain_s": 0.2}
    # A stalled machine must not look like a dead worker; tests of silence and of broken connections set shorter times.
    fields |= {"worker_reconnect_s": 30.0, "session_silence_s": 30.0}
    fields |= {"no_prefill_worker": "queue", "local_prefill_tokens": 0}  # every prompt goes to the prefill worker
    async with serving_router(kind(RouterConfig(**(fields | settings)), telemetry)) as router:
        yield router


@dataclass
class Stack:
    """A running router, its client's stubs and the workers behind it."""

    pair: FakePair
    telemetry: RecordingTelemetry
    router: ObservedRouter
    channel: grpc.aio.Channel
    stub: Any
    admin: Any
    admin_metadata: tuple[tuple[str, str], ...] = ()  # with a key of the admin port

    @property
    def prefill(self) -> FakeWorker:
        return self.pair.prefill

    @property
    def decode(self) -> FakeWorker:
        return self.pair.decode

    async def ready(self) -> None:
        await self.stub.ListModels(baton_pb2.ListModelsRequest(), timeout=READY_S)

    async def complete(self) -> None:
        """Ready, and no worker is still to come or to be probed."""
        await self.until(lambda s: s.ready and not s.detail and all(worker.connected for worker in s.workers))

    async def status(self) -> Any:
        return await self.admin.GetStatus(admin_pb2.GetStatusRequest(), metadata=self.admin_metadata)

    async def until(self, condition: Callable[[Any], bool]) -> Any:
        """Asks for the status until it is as wanted, and returns it."""
        async with asyncio.timeout(READY_S):
            while not condition(status := await self.status()):
                pass
        return status

    async def generate(self, text: str = "hello", **sampling: Any) -> list[Any]:
        """All events of one request, by kind."""
        request = baton_pb2.GenerateRequest(text=text, sampling=baton_pb2.SamplingParams(**sampling))
        call = self.stub.Generate(request, timeout=READY_S)
        return [response async for response in call]


def text_of(responses: list[Any], index: int = 0) -> str:
    deltas = [r.delta for r in responses if r.WhichOneof("event") == "delta" and r.delta.index == index]
    return "".join(delta.text for delta in deltas)


def tokens_of(responses: list[Any], index: int = 0) -> list[int]:
    """The tokens of one choice; checks that their offsets are contiguous."""
    tokens: list[int] = []
    for response in responses:
        if response.WhichOneof("event") == "delta" and response.delta.index == index:
            assert response.delta.offset == len(tokens)
            tokens.extend(response.delta.token_ids)
    return tokens


def encode(text: str) -> list[int]:
    return list(byte_level().encode(text).ids)


def echo(prompt: list[int], choice: int) -> list[int]:
    """The default script: the prompt again, as often as it takes, one token further on for each choice."""
    return [prompt[(i + choice) % len(prompt)] for i in range(128)]


@pytest.fixture
def stopped_pair(tmp_path: Path) -> FakePair:
    """Workers before they start; a test changes what routers learn of them by a fixture of this name."""
    return fake_pair(write_model_folder(tmp_path / "tiny"))


def fake_pair(folder: Path) -> FakePair:
    prefill, decode = (
        FakeWorker(worker_info(role, str(folder))) for role in (session_pb2.ROLE_PREFILL, session_pb2.ROLE_DECODE)
    )
    return FakePair(prefill, decode, echo)


@pytest.fixture
async def pair(stopped_pair: FakePair) -> AsyncIterator[FakePair]:
    for worker in stopped_pair.workers:
        await worker.start()
    yield stopped_pair
    for worker in stopped_pair.workers:
        await worker.stop()


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Fields of the router's configuration; a test sets its own with `indirect` parameters."""
    given: dict[str, Any] = getattr(request, "param", {})
    return given


@pytest.fixture
async def stack(pair: FakePair, settings: dict[str, Any]) -> AsyncIterator[Stack]:
    """Started; `ready()` waits until it serves."""
    telemetry = RecordingTelemetry()
    async with running_router(ObservedRouter, pair, settings, telemetry) as router:
        public, admin = router.running.ports
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{public}") as channel,
            grpc.aio.insecure_channel(f"127.0.0.1:{admin}") as admin_channel,
        ):
            stub = baton_pb2_grpc.BatonServiceStub(channel)
            yield Stack(pair, telemetry, router, channel, stub, admin_pb2_grpc.AdminServiceStub(admin_channel))
