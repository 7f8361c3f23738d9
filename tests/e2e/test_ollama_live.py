"""Ollama's Python client against a real stack."""

from tests.e2e.stack import Stack
from tests.fixtures.client_environment import problems

SCENARIOS = (
    "models", "embed", "chat", "generate", "stream", "logprobs", "formats", "loads", "asynchronous", "refusals",
)  # fmt: skip


def test_all_that_a_model_without_tools_can_show(stack: Stack) -> None:
    assert problems("ollama_client", stack.url, SCENARIOS) == []
