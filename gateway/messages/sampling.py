"""Fields that define how tokens are chosen: OpenAI's, and vLLM's additions."""

from typing import Annotated

from pydantic import Field

from baton.gateway.messages.base import Body, Count, Texts, TokenIds
from baton.gateway.messages.structure import StructureFields
from baton.gateway.messages.unserved import UnservedSampling, UnservedStream


class SamplingFields(StructureFields, UnservedSampling):
    """Ranges are checked where gRPC's are; here are types, and the range of a 32-bit field."""

    temperature: float | None = None
    top_p: float | None = None
    stop: str | Texts | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=1024)] | None = None

    top_k: int | None = Field(None, ge=-1, le=2**32 - 1, description="0 and -1 keep all")
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    best_of: Count | None = Field(None, description="so many are made; the likeliest are the answer")


class ChoiceFields(Body):
    n: Count | None = Field(None, description="choices; default: 1")


class PromptScoreFields(Body):
    prompt_logprobs: Count | None = Field(
        None, description="likeliest tokens to tell with each token of the prompt; at most 20, not in a stream"
    )


class ModelField(Body):
    model: str | None = Field(None, description="of a model or of an adapter; default: the model")


class RequestFields(ModelField):
    """About the request as a whole."""

    request_id: str | None = Field(None, description="default: the header x-request-id, or a new one")
    session_id: str | None = Field(None, description="requests of one session go to the same workers; also a header")
    cache_salt: str | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1, description="lower is earlier")


class StreamOptions(UnservedStream):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
