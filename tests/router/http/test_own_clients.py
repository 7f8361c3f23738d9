"""Clients of OpenAI, Anthropic and Ollama, unmodified, against a gateway whose workers' answers are scripted."""

import asyncio

import pytest

from tests.fixtures.client_environment import problems
from tests.router.conftest import echo, encode
from tests.router.http.conftest import Gateway
from tests.router.tokenizers_for_tests import END, byte_level

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OPENAI = "models chat chat_stream several token_prompts tools tools_stream responses_stored responses_tools refusals"
OLLAMA = "models embed chat generate stream tools loads asynchronous refusals"


def calls_or_echoes(prompt: list[int], choice: int) -> list[int]:
    """Script of a model that calls the tool where its prompt says so."""
    text = byte_level().decode(prompt, skip_special_tokens=False)
    if text.endswith("call the tool[assistant]"):
        return [*encode(CALL), byte_level().token_to_id(END)]
    return echo(prompt, choice)


@pytest.mark.parametrize(
    ("client", "path", "scenarios"),
    [
        ("openai_client", "/v1", OPENAI),
        ("anthropic_client", "", "create stream tools counts beta refusals"),
        ("ollama_client", "", OLLAMA),
    ],
)
async def test_client_of_a_protocol_has_no_problem(gateway: Gateway, client: str, path: str, scenarios: str) -> None:
    gateway.pair.script = calls_or_echoes
    url = f"http://127.0.0.1:{gateway.port}{path}"
    assert await asyncio.to_thread(problems, client, url, scenarios.split()) == []


async def test_ollama_client_reads_thoughts(gateway: Gateway) -> None:
    await gateway.thinks("<think>Hm.</think>Two.")
    url = f"http://127.0.0.1:{gateway.port}"
    assert await asyncio.to_thread(problems, "ollama_client", url, ["thoughts"]) == []
