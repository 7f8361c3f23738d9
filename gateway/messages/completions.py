"""POST /v1/completions."""

from typing import Annotated

from pydantic import Field

from gateway.messages.base import Count, TokenIds
from gateway.messages.sampling import RequestFields, SamplingFields, StreamOptions
from gateway.messages.structure import ResponseFormat

MAX_PROMPTS = 256

Prompts = Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
TokenPrompts = Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPTS)]


class CompletionRequest(RequestFields, SamplingFields):
    prompt: str | TokenIds | Prompts | TokenPrompts
    max_tokens: Count | None = Field(None, description="per choice; default: 16")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    logprobs: Count | None = Field(None, description="likeliest tokens to tell with each; at most 20")
    suffix: str | None = Field(None, description="not served")
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
