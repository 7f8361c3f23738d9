"""Bodies of POST /v1/embeddings, /v1/score and /v1/rerank; router/http/messages.py has the rules of bodies."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from baton.router.http.edge.problem import Renamed
from baton.router.http.messages import Count, ModelField, Texts, TokenIds, Unserved, harmless
from baton.router.public.vectors import DOCUMENTS, INPUTS, QUERIES

_CHAT_TEXT = "an input is a text or token ids"
_TRUNCATED = "shorten the input, with /tokenize"

# The router checks their number.
TokenInputs = Annotated[list[TokenIds], Field(fail_fast=True)]


class VectorFields(ModelField):
    """Fields of all three."""

    request_id: str | None = Field(None, description="default: the header x-request-id, or a new one")
    cache_salt: str | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1, description="lower is earlier")

    user: str | None = harmless("names an end user to OpenAI; here an API key names the tenant")

    truncate_prompt_tokens: Annotated[Any, Unserved(_TRUNCATED)] = None
    truncation_side: Annotated[Any, Unserved(_TRUNCATED)] = None
    mm_processor_kwargs: Annotated[Any, Unserved("inputs are text")] = None


class EmbeddingRequest(VectorFields):
    """POST /v1/embeddings."""

    renamed: ClassVar[Renamed] = {INPUTS: "input"}

    input: str | TokenIds | Texts | TokenInputs = Field(description="one text, token ids of one, or many of either")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of float32, little-endian; default: float"
    )
    dimensions: Count | None = Field(None, description="number of leading components of a vector to keep")
    prompt_name: str | None = Field(
        None, description="name of the checkpoint's prompt that precedes each text; default: the checkpoint's"
    )

    messages: Annotated[Any, Unserved(_CHAT_TEXT)] = None
    add_special_tokens: Annotated[Any, Unserved("give token ids for an input without them", (True,))] = None
    normalize: Annotated[Any, Unserved("the checkpoint says whether its vectors have length 1")] = None
    embed_dtype: Annotated[Any, Unserved("numbers are float32", ("float32",))] = None
    endianness: Annotated[Any, Unserved("numbers are little-endian", ("little", "native"))] = None


class ScoreRequest(VectorFields):
    """POST /v1/score."""

    renamed: ClassVar[Renamed] = {QUERIES: "text_1", DOCUMENTS: "text_2"}

    text_1: str | Texts = Field(description="one for all of text_2, or one for each")
    text_2: str | Texts

    activation: Annotated[Any, Unserved("a reranker's score is a probability", (True,))] = None
    use_activation: Annotated[Any, Unserved("a reranker's score is a probability", (True,))] = None


class RerankRequest(VectorFields):
    """POST /v1/rerank and /rerank."""

    renamed: ClassVar[Renamed] = {f"{QUERIES}[0]": "query"}

    query: str
    documents: Texts
    top_n: Count | None = Field(None, description="number of best documents to return; default and 0: all")
    return_documents: bool | None = Field(None, description="false: without their texts")

    max_tokens_per_doc: Annotated[Any, Unserved(_TRUNCATED)] = None
    activation: Annotated[Any, Unserved("a reranker's score is a probability", (True,))] = None
    use_activation: Annotated[Any, Unserved("a reranker's score is a probability", (True,))] = None


VECTOR_MESSAGES = (EmbeddingRequest, ScoreRequest, RerankRequest)
