"""OpenAI's own client, unmodified, against the gateway; what the workers say is scripted."""

import asyncio

from tests.fixtures.client_environment import problems
from tests.router.conftest import echo, encode
from tests.router.http.conftest import Gateway
from tests.router.tokenizers_for_tests import END, byte_level

SCENARIOS = (
    "models", "chat", "chat_stream", "several", "token_prompts", "tools", "tools_stream", "responses_stored",
    "responses_tools", "refusals",
)  # fmt: skip
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def script(prompt: list[int], choice: int) -> list[int]:
    text = byte_level().decode(prompt, skip_special_tokens=False)
    if text.endswith("call the tool[assistant]"):
        return [*encode(CALL), byte_level().token_to_id(END)]
    return echo(prompt, choice)


async def test_all_that_scripted_workers_can_show(gateway: Gateway) -> None:
    gateway.pair.script = script
    url = f"http://127.0.0.1:{gateway.port}/v1"
    assert await asyncio.to_thread(problems, "openai_client", url, SCENARIOS) == []
