"""vLLM's simple server and its tokenizer routes."""

from typing import Annotated

from pydantic import Field

from baton.gateway.messages.base import Count, TokenIds
from baton.gateway.messages.chat import ChatMessage, TemplateOptions, Tool
from baton.gateway.messages.sampling import ChoiceFields, ModelField, RequestFields, SamplingFields
from baton.gateway.messages.unserved import UnservedTokenize


class GenerateRequest(RequestFields, SamplingFields, ChoiceFields):
    """POST /generate."""

    prompt: str
    max_tokens: Count | None = Field(None, description="per choice; default: 16")
    stream: bool | None = None


class TokenizeRequest(ModelField, UnservedTokenize):
    """POST /tokenize; either a prompt or messages."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=128)] | None = Field(
        None, description="with messages"
    )
    add_special_tokens: bool | None = Field(None, description="with a prompt; default: true")
    add_generation_prompt: bool | None = Field(None, description="with messages; default: true")
    chat_template_kwargs: TemplateOptions | None = Field(None, description="with messages")
    return_token_strs: bool | None = None


class DetokenizeRequest(ModelField):
    """POST /detokenize."""

    tokens: TokenIds
