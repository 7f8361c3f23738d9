"""Bodies of POST /api/chat, generate, embed and show. The rules for bodies are in router/http/messages.py."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from baton.router.http.dialects import TEXT_ONLY, Body, Unserved, harmless
from baton.router.http.edge.problem import Renamed
from baton.router.http.messages import MAX_TOOLS, ChatTool, Count, ModelField, RequestFields, Texts
from baton.router.public.chat import EFFORT, THINKING
from baton.router.public.vectors import INPUTS

_TEMPLATE = "the model's own chat template is used"
_OWN = "models cannot be changed"
_LOADED = "the model is always loaded"
_SERVER = "flags of the server configure the engine"
_TOO_LONG = "prompts that are too long are rejected"
_MIROSTAT = "use top_k, top_p, min_p or typical_p"


_SAME = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop", "presence_penalty", "frequency_penalty")
OPTIONS = {**{name: name for name in _SAME}, "max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
"""Ollama's names of sampling parameters, by the router's names."""


class Options(Body):
    """Sampling options. Omitted options have the model's defaults, which may differ from Ollama's."""

    temperature: float | None = None
    num_predict: int | None = Field(
        None, ge=-2, le=2**32 - 1, description="default, -1 and -2: the rest of the context"
    )
    top_k: Count | None = Field(None, description="0 keeps all")
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1, description="-1: a random seed")
    stop: Texts | None = None
    repeat_penalty: float | None = Field(None, description="applies to all tokens of prompt and answer")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    num_ctx: Count | None = harmless("the server sets the context; prompts that are too long are rejected")
    num_keep: int | None = harmless("prompts are not truncated")
    num_batch: Count | None = harmless(_SERVER)
    num_gpu: int | None = harmless(_SERVER)
    main_gpu: int | None = harmless(_SERVER)
    num_thread: int | None = harmless(_SERVER)
    numa: bool | None = harmless(_SERVER)
    low_vram: bool | None = harmless(_SERVER)
    f16_kv: bool | None = harmless(_SERVER)
    use_mmap: bool | None = harmless(_SERVER)
    use_mlock: bool | None = harmless(_SERVER)
    mirostat_tau: float | None = harmless("parameter of mirostat, which is off")
    mirostat_eta: float | None = harmless("parameter of mirostat, which is off")

    mirostat: Annotated[Any, Unserved(_MIROSTAT, (0,))] = None
    tfs_z: Annotated[Any, Unserved(_MIROSTAT, (1, 1.0))] = None
    repeat_last_n: Annotated[Any, Unserved("penalties apply to all tokens", (-1,))] = None
    penalize_newline: Annotated[Any, Unserved("penalties apply to all tokens", (True,))] = None
    logits_all: Annotated[Any, Unserved("use logprobs", (False,))] = None
    vocab_only: Annotated[Any, Unserved(_LOADED, (False,))] = None
    embedding_only: Annotated[Any, Unserved(TEXT_ONLY, (False,))] = None


class AskedFields(RequestFields):
    """Fields that /api/chat and /api/generate have in common."""

    renamed: ClassVar[Renamed] = {
        **{ours: f"options.{theirs}" for ours, theirs in OPTIONS.items()},
        "logprobs": "top_logprobs",
        "json_schema": "format",
        "json_object": "format",
        "text": "prompt",
        "messages[].reasoning": "messages[].thinking",
        "messages[].name": "messages[].tool_name",
        f"template_options.{THINKING}": "think",
        f"template_options.{EFFORT}": "think",
    }

    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = Field(None, description="any JSON object, or a JSON schema")
    think: bool | Literal["low", "medium", "high"] | None = Field(
        None, description="default: the template's; a word sets reasoning_effort of the template"
    )
    stream: bool | None = Field(None, description="default: true")
    logprobs: bool | None = None
    top_logprobs: Count | None = Field(None, description="needs logprobs; at most 20")

    keep_alive: str | float | None = harmless(_LOADED)

    truncate: Annotated[Any, Unserved(_TOO_LONG, (False,))] = None
    shift: Annotated[Any, Unserved("an answer ends at the context length", (False,))] = None


class EarlierFunction(Body):
    name: str
    arguments: dict[str, Any]

    description: str | None = harmless("description of the called function")
    index: Count | None = harmless("position of the call; the list is ordered")


class EarlierCall(Body):
    """A tool call of an earlier answer."""

    id: str = ""
    function: EarlierFunction

    type: Literal["function"] | None = harmless("all calls are function calls")


class Turn(Body):
    role: str
    content: str | None = None
    thinking: str | None = Field(None, description="reasoning of an earlier answer, if the model's template reads it")
    tool_calls: Annotated[list[EarlierCall], Field(fail_fast=True)] | None = None
    tool_name: str | None = Field(None, description="name of the function that returned this result")
    tool_call_id: str | None = None

    images: Annotated[Any, Unserved(TEXT_ONLY, ([],))] = None


class OllamaChatRequest(AskedFields):
    """POST /api/chat. A request without messages asks only whether the model is loaded."""

    messages: Annotated[list[Turn], Field(fail_fast=True)] | None = None
    tools: Annotated[list[ChatTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(AskedFields):
    """POST /api/generate. A request without a prompt asks only whether the model is loaded."""

    renamed: ClassVar[Renamed] = {**AskedFields.renamed, "messages": "prompt"}

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = Field(None, description="true: no chat template is applied to the prompt")

    suffix: Annotated[Any, Unserved("fill-in-the-middle is not implemented", ("",))] = None
    template: Annotated[Any, Unserved(_TEMPLATE, ("",))] = None
    context: Annotated[Any, Unserved("use /api/chat for a conversation", ([],))] = None
    images: Annotated[Any, Unserved(TEXT_ONLY, ([],))] = None


class OllamaEmbedRequest(ModelField):
    """POST /api/embed."""

    renamed: ClassVar[Renamed] = {INPUTS: "input"}

    input: str | Texts = Field(description="one text, or many")
    dimensions: Count | None = Field(None, description="number of leading components of a vector to keep")

    keep_alive: str | float | None = harmless(_LOADED)
    options: dict[str, Any] | None = harmless("embeddings are not sampled")

    truncate: Annotated[Any, Unserved("inputs that are too long are rejected", (False,))] = None


class OllamaShowRequest(ModelField):
    """POST /api/show."""

    name: str | None = Field(None, description="an older name of model")

    verbose: bool | None = harmless("all details are always shown")

    system: Annotated[Any, Unserved(_OWN, ("",))] = None
    template: Annotated[Any, Unserved(_OWN, ("",))] = None
    options: Annotated[Any, Unserved(_OWN, ({},))] = None


OLLAMA_MESSAGES = (OllamaChatRequest, OllamaEmbedRequest, OllamaGenerateRequest, OllamaShowRequest)
