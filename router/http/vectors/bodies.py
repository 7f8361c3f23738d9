"""Bodies of POST /v1/embeddings, /v1/score and /v1/rerank. The rules for bodies are in router/http/messages.py."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from baton.router.http.dialects import Unserved, harmless
from baton.router.http.edge.problem import Renamed
from baton.router.http.messages import CallFields, Count, Texts, TokenIds
from baton.router.public.vectors import DOCUMENTS, INPUTS, QUERIES

_CHAT_TEXT = "send each input as text or token ids"
_TRUNCATED = "shorten the input; /tokenize counts its tokens"

TokenInputs = Annotated[list[TokenIds], Field(fail_fast=True)]


class VectorFields(CallFields):
    """Fields that requests for embeddings, scores and ranked documents have in common."""

    user: str | None = harmless("names an end user to OpenAI; here an API key names the tenant")

    truncate_prompt_tokens: Annotated[Any, Unserved(_TRUNCATED)] = None
    truncation_side: Annotated[Any, Unserved(_TRUNCATED)] = None
    mm_processor_kwargs: Annotated[Any, Unserved("inputs are text")] = None


class EmbeddingRequest(VectorFields):
    """POST /v1/embeddings."""

    renamed: ClassVar[Renamed] = {INPUTS: "input"}

    input: str | TokenIds | Texts | TokenInputs = Field(description="one or more inputs, as text or token ids")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: little-endian float32; default: float"
    )
    dimensions: Count | None = Field(None, description="number of leading components of a vector to keep")
    prompt_name: str | None = Field(
        None, description="name of the checkpoint's prompt that precedes each text; default: the checkpoint's"
    )

    messages: Annotated[Any, Unserved(_CHAT_TEXT)] = None
    add_special_tokens: Annotated[Any, Unserved("send token ids for an input without special tokens", (True,))] = None
    normalize: Annotated[Any, Unserved("the checkpoint configures normalisation")] = None
    embed_dtype: Annotated[Any, Unserved("numbers are float32", ("float32",))] = None
    endianness: Annotated[Any, Unserved("numbers are little-endian", ("little", "native"))] = None


class ScoredFields(VectorFields):
    activation: Annotated[Any, Unserved("a reranker's score is a probability", (True,))] = None
    use_activation: Annotated[Any, Unserved("a reranker's score is a probability", (True,))] = None


class ScoreRequest(ScoredFields):
    """POST /v1/score."""

    renamed: ClassVar[Renamed] = {QUERIES: "text_1", DOCUMENTS: "text_2"}

    text_1: str | Texts = Field(description="one text for all of text_2, or one for each")
    text_2: str | Texts


class RerankRequest(ScoredFields):
    """POST /v1/rerank and /rerank."""

    renamed: ClassVar[Renamed] = {f"{QUERIES}[0]": "query"}

    query: str
    documents: Texts
    top_n: Count | None = Field(None, description="number of best documents to return; default: 0, which returns all")
    return_documents: bool | None = Field(None, description="false: omit the texts of the documents")

    max_tokens_per_doc: Annotated[Any, Unserved(_TRUNCATED)] = None


VECTOR_MESSAGES = (EmbeddingRequest, ScoreRequest, RerankRequest)
