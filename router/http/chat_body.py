"""Builders for parts of a chat's body, used to convert requests of the Anthropic, Ollama and Responses APIs. Pure."""

from collections.abc import Mapping
from typing import Any

from baton.router.http.edge.problem import refused
from baton.router.http.messages import RequestFields

ChatPart = Mapping[str, Any]


def function_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None
) -> ChatPart:
    function = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


def named_tool(name: str) -> ChatPart:
    """Return the tool choice that forces a call of this function."""
    return {"type": "function", "function": {"name": name}}


def schema_format(schema: Mapping[str, Any], name: str = "") -> ChatPart:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def request_fields(message: RequestFields) -> dict[str, Any]:
    """Return the fields of the message that are in the bodies of all APIs."""
    return {name: getattr(message, name) for name in RequestFields.model_fields}


def logprobs_count(logprobs: bool | None, top_logprobs: int | None) -> int | None:
    """Return how many most likely tokens to return per token; None without log-probabilities. Raises: Problem."""
    if top_logprobs is not None and not logprobs:
        raise refused("top_logprobs", "needs logprobs to be true")
    return (top_logprobs or 0) if logprobs else None
