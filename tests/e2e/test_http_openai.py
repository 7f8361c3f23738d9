"""OpenAI's own client, unmodified, against real workers."""

import json
import subprocess
from pathlib import Path

from tests.e2e.stack import Stack
from tests.fixtures.client_environment import client_python

PROGRAM = Path(__file__).parents[1] / "fixtures" / "openai_client" / "program.py"
SCENARIOS = (
    "models", "chat", "chat_stream", "chat_logprobs", "several", "completion", "completion_stream", "token_prompts",
    "forced_tools", "structured", "responses", "refusals", "many_at_once",
)  # fmt: skip
TIMEOUT_S = 120


def test_all_that_a_model_without_tools_can_show(stack: Stack) -> None:
    command = [str(client_python("openai_client")), str(PROGRAM), f"{stack.url}/v1", *SCENARIOS]

    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)

    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["scenario"] for result in results] == list(SCENARIOS)
    assert [result["problem"] for result in results if result["problem"]] == []
