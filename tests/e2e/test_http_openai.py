"""OpenAI's Python client against a real stack."""

from tests.e2e.stack import Stack
from tests.fixtures.client_environment import problems

SCENARIOS = (
    "models", "chat", "chat_stream", "chat_logprobs", "several", "completion", "completion_stream", "token_prompts",
    "forced_tools", "structured", "responses", "responses_stored", "responses_forced", "responses_compacted",
    "refusals", "many_at_once",
)  # fmt: skip


def test_all_that_a_model_without_tools_can_show(stack: Stack) -> None:
    assert problems("openai_client", f"{stack.url}/v1", SCENARIOS) == []
