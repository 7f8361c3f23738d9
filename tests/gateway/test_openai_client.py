"""OpenAI's own client, unmodified, against the gateway; what the workers say is scripted."""

import asyncio
import json
from pathlib import Path

from tests.fixtures.client_environment import client_python
from tests.gateway.conftest import Gateway
from tests.router.conftest import echo, encode
from tests.router.tokenizers_for_tests import END, byte_level

PROGRAM = Path(__file__).parents[1] / "fixtures" / "openai_client" / "program.py"
SCENARIOS = ("models", "chat", "chat_stream", "several", "token_prompts", "tools", "tools_stream", "refusals")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def script(prompt: list[int], choice: int) -> list[int]:
    text = byte_level().decode(prompt, skip_special_tokens=False)
    if text.endswith("call the tool[assistant]"):
        return [*encode(CALL), byte_level().token_to_id(END)]
    return echo(prompt, choice)


async def test_all_that_scripted_workers_can_show(gateway: Gateway) -> None:
    gateway.pair.script = script
    url = f"http://127.0.0.1:{gateway.port}/v1"
    python = await asyncio.to_thread(client_python, "openai_client")

    program = await asyncio.create_subprocess_exec(
        str(python), str(PROGRAM), url, *SCENARIOS, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await program.communicate()

    results = [json.loads(line) for line in output.splitlines()]
    assert [result["scenario"] for result in results] == list(SCENARIOS)
    assert [result["problem"] for result in results if result["problem"]] == []
