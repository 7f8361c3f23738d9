"""A real gateway with fake workers, all in this process, over real HTTP."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from baton.process.serving.server import Running, serve
from baton.process.telemetry.spans import NoTelemetry
from baton.protos import session_pb2
from baton.router.config import RouterConfig
from baton.router.fleet.wire import versions_message
from baton.router.http.process import HttpRouterProcess
from baton.versions import OWN
from tests.fixtures.chromium import Browser, Page
from tests.router.conftest import echo
from tests.router.fake_worker import FakePair, FakeWorker, worker_info
from tests.router.tokenizers_for_tests import END, byte_level, write_model_folder

WAIT_S = 20.0
CLIENT_S = 60.0  # a large body waits for a process to start
HERMES_TEMPLATE = (
    "{% if tools %}[tools]{{ tools | tojson }}{# <tool_call> #}{% endif %}"
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


class ObservedGateway(HttpRouterProcess):
    """Tells the test when it listens."""

    started: asyncio.Event

    async def start(self, running: Running) -> None:
        self.running = running
        await super().start(running)
        self.started.set()


@dataclass
class Gateway:
    process: ObservedGateway
    pair: FakePair
    client: httpx2.AsyncClient

    @property
    def port(self) -> int:
        return self.process.http_port

    async def post(self, path: str, **body: Any) -> Any:
        """The answer's JSON; checks that it is no error."""
        response = await self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    async def refused(self, path: str, status: int = 400, **body: Any) -> Any:
        """The error object."""
        response = await self.client.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()["error"]

    async def stream(self, path: str, **body: Any) -> list[Any]:
        """The JSON of every event; checks that the stream ends as it should."""
        response = await self.client.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events = response.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    @asynccontextmanager
    async def held(self, path: str, **body: Any) -> AsyncIterator[None]:
        """Within it a request is with the workers, which say nothing; then its client goes."""
        self.pair.manual = True
        asking = asyncio.create_task(self.client.post(path, json=body))
        await self.pair.prefill.received("prefill")
        yield
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    def says(self, *answers: str) -> None:
        """What the fake workers answer from now on, by choice; an end-of-sequence token is the last."""
        end = byte_level().token_to_id(END)
        tokens = [[*byte_level().encode(answer).ids, end] for answer in answers]
        self.pair.script = lambda prompt, choice: tokens[choice % len(tokens)]

    @property
    def prefill(self) -> Any:
        """The last command to compute a prompt."""
        return [c.prefill for c in self.pair.prefill.commands if c.WhichOneof("command") == "prefill"][-1]

    def prompt(self) -> str:
        """The text of the last prompt that was computed."""
        return byte_level().decode(list(self.prefill.token_ids), skip_special_tokens=False)


@pytest.fixture
def model_name(request: pytest.FixtureRequest) -> str:
    """Name of the served model; a test sets its own with `indirect` parameters."""
    name: str = getattr(request, "param", "tiny")
    return name


@pytest.fixture
async def pair(tmp_path: Path, model_name: str) -> AsyncIterator[FakePair]:
    folder = write_model_folder(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text(HERMES_TEMPLATE)
    prefill = FakeWorker(worker_info(session_pb2.ROLE_PREFILL, str(folder)))
    decode = FakeWorker(worker_info(session_pb2.ROLE_DECODE, str(folder)))
    prefill.info.versions.MergeFrom(versions_message(OWN))  # else it is asked for no vectors
    for worker in (prefill, decode):
        worker.info.model.max_model_len = 1024
        worker.info.model.name = model_name
        await worker.start()
    yield FakePair(prefill, decode, echo)
    await prefill.stop()
    await decode.stop()


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Fields of the configuration; a test sets its own with `indirect` parameters."""
    given: dict[str, Any] = getattr(request, "param", {})
    return given


@pytest.fixture
async def gateway(pair: FakePair, settings: dict[str, Any]) -> AsyncIterator[Gateway]:
    workers = f"prefill@{pair.prefill.endpoint},decode@{pair.decode.endpoint}"
    fields: dict[str, Any] = {"port": 0, "admin_port": 0, "http_port": 0, "workers": workers, "drain_s": 0.2}
    fields |= {"worker_reconnect_s": 30.0, "session_silence_s": 30.0}  # a machine that stalls is no worker that died
    fields |= {"no_prefill_worker": "queue", "local_prefill_tokens": 0}  # every prompt goes to the prefill worker
    config = RouterConfig(**(fields | settings))
    process = ObservedGateway(config, NoTelemetry())
    process.started = asyncio.Event()
    serving = asyncio.create_task(serve(process, grace_s=config.drain_s))
    await process.started.wait()
    trusted: Any = False  # no TLS: reading all authorities takes longer than most tests
    if config.tls is not None:
        trusted = ssl.create_default_context(cafile=config.tls.certificate.with_name("ca.pem"))
    url = f"{'http' if config.tls is None else 'https'}://127.0.0.1:{process.http_port}"
    async with httpx2.AsyncClient(base_url=url, timeout=CLIENT_S, trust_env=False, verify=trusted) as client:
        await client.get("/v1/models")  # waits until it is ready
        yield Gateway(process, pair, client)
    process.running.stop()
    assert await serving == 0


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
async def page(browser: Browser) -> AsyncIterator[Page]:
    """An empty page of a browser; a test that has it is skipped where there is no Chromium."""
    async with browser.page() as page:
        yield page
