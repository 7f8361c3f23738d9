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

from baton.process.telemetry.spans import NoTelemetry
from baton.router.fleet.wire import versions_message
from baton.router.http.process import HttpRouterProcess
from baton.router.model.chat_template import ChatTemplate
from baton.versions import OWN
from tests.fixtures.chromium import Browser, Page
from tests.fixtures.routed import ObservedRouter
from tests.router.conftest import fake_pair, running_router
from tests.router.fake_worker import FakePair
from tests.router.tokenizers_for_tests import END, byte_level, write_model_folder

WAIT_S = 20.0
CLIENT_S = 60.0  # a large body waits for a process to start
HERMES_TEMPLATE = (
    "{% if tools %}[tools]{{ tools | tojson }}{# <tool_call> #}{% endif %}"
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
QWEN3 = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    "{% if tools %}[tools]{{ tools | tojson }}{# <tool_call> #}{% endif %}"
)
"""As Qwen 3: the request says whether the model thinks."""


class ObservedGateway(ObservedRouter, HttpRouterProcess):
    """A router with HTTP that tells when it listens."""


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

    async def thinks(self, *answers: str, template: str = QWEN3) -> None:
        """The model has this chat template and answers so from now on."""
        served = (await self.process.dispatcher.choose("")).served
        served.tokenizer.chat_template = ChatTemplate(template, {})
        self.says(*answers)

    async def events(self, path: str, **body: Any) -> list[tuple[str, Any]]:
        """Name and JSON of every event of a stream whose events have names."""
        response = await self.client.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        parts = [part.partition("\ndata: ") for part in response.text.split("\n\n") if part]
        return [(name.removeprefix("event: "), json.loads(data)) for name, _, data in parts]

    async def raw(self, *parts: bytes) -> bytes:
        """Everything that the server sends until it closes a connection; each part arrives after the one before."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for number, part in enumerate(parts):
                if number:
                    await self.client.get("/health")  # by then the part before was read
                writer.write(part)
                await writer.drain()
            async with asyncio.timeout(WAIT_S):
                return await reader.read()
        finally:
            writer.close()

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
def stopped_pair(tmp_path: Path, model_name: str) -> FakePair:
    folder = write_model_folder(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text(HERMES_TEMPLATE)
    pair = fake_pair(folder)
    pair.prefill.info.versions.MergeFrom(versions_message(OWN))  # else it is asked for no vectors
    for worker in pair.workers:
        worker.info.model.max_model_len = 1024
        worker.info.model.name = model_name
    return pair


@pytest.fixture
async def gateway(pair: FakePair, settings: dict[str, Any]) -> AsyncIterator[Gateway]:
    async with running_router(ObservedGateway, pair, settings, NoTelemetry()) as process:
        tls = process.config.tls
        # Without TLS nothing is verified: reading all authorities takes longer than most tests.
        trusted: Any = tls and ssl.create_default_context(cafile=tls.certificate.with_name("ca.pem"))
        url = f"{'https' if tls else 'http'}://127.0.0.1:{process.http_port}"
        async with httpx2.AsyncClient(
            base_url=url, timeout=CLIENT_S, trust_env=False, verify=trusted or False
        ) as client:
            await process.dispatcher.choose("")  # waits until it is ready; limits on HTTP do not end this wait
            yield Gateway(process, pair, client)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
async def page(browser: Browser) -> AsyncIterator[Page]:
    """An empty page of a browser; a test that has it is skipped where there is no Chromium."""
    async with browser.page() as page:
        yield page
