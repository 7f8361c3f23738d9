"""Parts of a chat's body, into which Anthropic's, Ollama's and OpenAI's Responses API convert their requests. Pure."""

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
    """Return the tool choice that forces this function."""
    return {"type": "function", "function": {"name": name}}


def schema_format(schema: Mapping[str, Any], name: str = "") -> ChatPart:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def request_fields(message: RequestFields) -> dict[str, Any]:
    """Return the fields that all requests share."""
    return {name: getattr(message, name) for name in RequestFields.model_fields}


def logprobs_count(logprobs: bool | None, top_logprobs: int | None) -> int | None:
    """Return the number of likeliest tokens per token, None without log-probabilities. Raises: Problem."""
    if top_logprobs is not None and not logprobs:
        raise refused("top_logprobs", "needs logprobs to be true")
    return (top_logprobs or 0) if logprobs else None
