"""vLLM's simple server and its tokenizer routes."""

from typing import Annotated

from pydantic import Field

from gateway.messages.base import Count, TokenIds
from gateway.messages.chat import ChatMessage, Tool
from gateway.messages.sampling import RequestFields, SamplingFields


class GenerateRequest(RequestFields, SamplingFields):
    """POST /generate."""

    prompt: str
    max_tokens: Count | None = Field(None, description="per choice; default: 16")
    stream: bool | None = None


class TokenizeRequest(RequestFields):
    """POST /tokenize; either a prompt or messages."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=128)] | None = None
    add_special_tokens: bool | None = Field(None, description="default: true for a prompt, false for messages")
    add_generation_prompt: bool | None = Field(None, description="default: true")
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestFields):
    """POST /detokenize."""

    tokens: TokenIds
