"""POST /v1/completions."""

from typing import Annotated

from pydantic import Field

from baton.gateway.messages.base import Count, TokenIds
from baton.gateway.messages.harmless import HarmlessFields
from baton.gateway.messages.sampling import (
    ChoiceFields,
    PromptScoreFields,
    RequestFields,
    SamplingFields,
    StreamOptions,
)
from baton.gateway.messages.structure import ResponseFormat
from baton.gateway.messages.unserved import UnservedCompletion

MAX_PROMPTS = 256

Prompts = Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
TokenPrompts = Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPTS)]


class CompletionRequest(
    RequestFields, SamplingFields, ChoiceFields, PromptScoreFields, HarmlessFields, UnservedCompletion
):
    prompt: str | TokenIds | Prompts | TokenPrompts
    max_tokens: Count | None = Field(None, description="per choice; default: 16")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    logprobs: Count | None = Field(None, description="likeliest tokens to tell with each; at most 20")
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
