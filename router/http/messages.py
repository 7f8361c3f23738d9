"""Bodies of HTTP requests, as pydantic models. A field that is neither served nor harmless is rejected by name.

Each model lists the fields that it serves, then harmless fields, which are accepted without effect, since no value of
their type can change an answer. Last come fields of OpenAI and vLLM that would change an answer and are not served:
they are rejected with the reason, except for values that ask for nothing. Fields of these two kinds that a complete
API has are in dialects.py.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from baton.router.http.dialects import TEXT_ONLY, Body, ChatUnserved, OpenAIUnserved, Unserved, harmless
from baton.router.http.edge.problem import Renamed

MAX_PROMPTS = 256
MAX_TOOLS = 1024

Count = Annotated[int, Field(ge=0, le=2**32 - 1)]
TokenId = int  # checked against the vocabulary later, by the router
# fail_fast: lists may be long, so validation stops at the first invalid element.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Prompts = Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
TokenPrompts = Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPTS)]


# Types of fields that request structured output, in OpenAI's API and in vLLM's


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchema(Body):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="answers follow the schema for both values")


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class NamedSchemaFormat(Body):
    """JSON schema as the format of a response (Responses API)."""

    type: Literal["json_schema"]
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="answers follow the schema for both values")


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """Structured output in vLLM's fields, of which exactly one must be given."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None

    disable_fallback: bool | None = harmless("there is one library for structured output")
    disable_any_whitespace: bool | None = harmless("JSON has no white space, which both values allow")

    whitespace_pattern: Annotated[Any, Unserved("JSON has no white space")] = None
    structural_tag: Annotated[Any, Unserved("use json, regex, choice or grammar")] = None
    disable_additional_properties: Annotated[Any, Unserved("set additionalProperties in the schema", (False,))] = None


class Speculative(Body):
    """Speculative decoding, which changes no token of an answer. The router checks the ranges, as for gRPC."""

    method: str = Field("ngram", description="ngram, draft_model or off; must be configured on the worker")
    num_speculative_tokens: Count | None = Field(None, description="from 1 to 64; default: the worker's maximum")


# Base classes with fields that several bodies have


class ModelField(Body):
    model: str | None = Field(None, description="name of the model or of an adapter; default: the model")


class CallFields(ModelField):
    """Fields of all requests that workers compute."""

    request_id: str | None = Field(None, description="default: the header x-request-id, or a new id")
    cache_salt: str | None = None
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="requests with lower values are scheduled first"
    )


class RequestFields(CallFields):
    """Fields of requests that generate text, except sampling parameters."""

    session_id: str | None = Field(None, description="conversation whose KV is kept; default: the header x-session-id")
    keep_for_s: float | None = Field(None, description="seconds for which KV is kept for the next turn")
    done: bool | None = Field(None, description="true: this is the session's last turn, and its KV is evicted first")
    ttft_slo_ms: float | None = Field(None, description="TTFT objective; default: the API key's or the service's")
    tbt_slo_ms: float | None = Field(None, description="TBT objective; default: the API key's or the service's")


class SamplingFields(Body):
    """Sampling parameters: OpenAI's fields, and further fields of vLLM.

    Types and the ranges of 32-bit fields are checked here. The router checks all other ranges, as for gRPC.
    """

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
    best_of: Count | None = Field(None, description="number of generated choices, of which the likeliest are returned")

    # Structured output under vLLM's current name and its older names. At most one may be given.
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="the older name of structured_outputs.json")
    guided_regex: str | None = Field(None, description="the older name of structured_outputs.regex")
    guided_choice: Texts | None = Field(None, description="the older name of structured_outputs.choice")
    guided_grammar: str | None = Field(None, description="the older name of structured_outputs.grammar")
    guided_json_object: bool | None = Field(None, description="the older name of structured_outputs.json_object")

    speculative: Speculative | None = None

    guided_decoding_backend: str | None = harmless("selects a library for structured output; there is one")

    skip_special_tokens: Annotated[Any, Unserved("special tokens have no text", (True,))] = None
    spaces_between_special_tokens: Annotated[Any, Unserved("special tokens have no text", (True,))] = None
    include_stop_str_in_output: Annotated[Any, Unserved("answers end before the stop text", (False,))] = None
    truncate_prompt_tokens: Annotated[Any, Unserved("shorten the prompt; /tokenize counts its tokens")] = None
    truncation_side: Annotated[Any, Unserved("shorten the prompt; /tokenize counts its tokens")] = None
    use_beam_search: Annotated[Any, Unserved("use beam_width over gRPC", (False,))] = None
    length_penalty: Annotated[Any, Unserved("use beam search over gRPC", (1, 1.0))] = None
    early_stopping: Annotated[Any, Unserved("use beam search over gRPC", (False,))] = None
    detokenize: Annotated[Any, Unserved("answers are text; use return_token_ids", (True,))] = None
    logits_processors: Annotated[Any, Unserved("clients' code is not run", ([],))] = None
    return_tokens_as_token_ids: Annotated[Any, Unserved("use return_token_ids", (False,))] = None
    thinking_token_budget: Annotated[Any, Unserved("use /v1/chat/completions")] = None
    repetition_detection: Annotated[Any, Unserved("use repetition_penalty")] = None
    kv_transfer_params: Annotated[Any, Unserved("the router places KV")] = None
    vllm_xargs: Annotated[Any, Unserved("vLLM's extensions do not exist here", ({},))] = None
    guided_whitespace_pattern: Annotated[Any, Unserved("JSON has no white space")] = None
    structural_tag: Annotated[Any, Unserved("use structured_outputs")] = None


class OpenAIFields(OpenAIUnserved, RequestFields, SamplingFields):
    """Fields that all requests of OpenAI's API have."""

    prompt_cache_key: str | None = Field(None, description="OpenAI's name of session_id; session_id takes precedence")
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        None, description="600 s, or 86400 s for 24h; keep_for_s takes precedence"
    )


class ResponseStreamOptions(Body):
    include_obfuscation: Annotated[Any, Unserved("chunks have no padding; use TLS", (False,))] = None


class StreamOptions(ResponseStreamOptions):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ChoiceFields(OpenAIFields):
    """Fields that completions and chats have in common."""

    n: Count | None = Field(None, description="choices; default: 1")
    prompt_logprobs: Count | None = Field(
        None, description="number of likeliest tokens to return per prompt token; at most 20, not in a stream"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None


class CompletionRequest(ChoiceFields):
    """POST /v1/completions."""

    renamed: ClassVar[Renamed] = dict.fromkeys(("text", "token_ids", "token_ids.ids", "prompts"), "prompt")

    prompt: str | TokenIds | Prompts | TokenPrompts
    max_tokens: Count | None = Field(None, description="per choice; default: 16")
    echo: bool | None = None
    logprobs: Count | None = Field(None, description="number of likeliest tokens to return per token; at most 20")

    suffix: Annotated[Any, Unserved("fill-in-the-middle is not implemented", ("",))] = None
    prompt_embeds: Annotated[Any, Unserved("send the prompt as text or token ids")] = None
    add_special_tokens: Annotated[Any, Unserved("send token ids for a prompt without special tokens", (True,))] = None


# POST /v1/chat/completions


class CacheControl(Body):
    """Anthropic's mark for a prefix that should be cached. The prefix cache needs no marks, but `ttl` is used."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = Field(
        None, description="keep_for_s of the session, if the request names a session"
    )

    scope: str | None = harmless("the prefix cache needs no marks")


class MessagePart(Body):
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = harmless("the prefix cache needs no marks")


class MessageText(MessagePart):
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    name: str
    arguments: str

    parsed_arguments: Any = harmless("OpenAI's client adds the parsed arguments")


class ToolCallMessage(Body):
    """A tool call of an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    index: Count | None = harmless("position in a stream; the list is ordered")


class ChatMessage(Body):
    role: str
    content: str | Annotated[list[MessageText], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallMessage], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(
        None, description="reasoning of an earlier answer, if the model's template reads it"
    )
    reasoning: str | None = Field(None, description="another name of reasoning_content")

    # Fields that a message has if it is an earlier answer.
    annotations: list[Any] | None = harmless("citations of an earlier answer, which no template shows")
    parsed: Any = harmless("OpenAI's client adds the parsed content")

    # Fields that no chat template shows.
    refusal: Annotated[Any, Unserved("send the text in content", ("",))] = None
    function_call: Annotated[Any, Unserved("send calls in tool_calls")] = None
    audio: Annotated[Any, Unserved(TEXT_ONLY)] = None


Parameters = Annotated[dict[str, Any], BeforeValidator(lambda given: {"type": "object"} if given is True else given)]
"""JSON schema of a function's arguments; `true` allows any object."""


class FunctionTool(Body):
    name: str
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = Field(None, description="calls forced by tool_choice follow the schema for both values")


class ChatTool(Body):
    type: Literal["function"]
    function: FunctionTool
    defer_loading: bool | None = Field(None, description="true: the prompt does not describe it, but it can be called")


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool
TemplateOptions = dict[str, bool | int | float | str | None]


class ChatRequest(ChatUnserved, ChoiceFields):
    """POST /v1/chat/completions."""

    renamed: ClassVar[Renamed] = {
        **CompletionRequest.renamed,
        "logprobs": "top_logprobs",
        "template_options": "chat_template_kwargs",
        "messages[].reasoning": "messages[].reasoning_content",
    }

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)]
    max_tokens: Count | None = Field(
        None, description="per choice; default: the rest of the context, to which larger values are reduced"
    )
    max_completion_tokens: Count | None = Field(None, description="the newer name of max_tokens")
    logprobs: bool | None = None
    top_logprobs: Count | None = Field(None, description="needs logprobs; at most 20")
    tools: Annotated[list[ChatTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        None, description="true: the answer continues the last message, which is the assistant's"
    )
    chat_template_kwargs: TemplateOptions | None = Field(None, description="variables of the model's template")
    reasoning_effort: str | None = Field(
        None,
        description="variable of the model's template; with enable_thinking only, `none` is false, others are true",
    )
    enable_thinking: bool | None = Field(None, description="variable of the model's template")
    thinking_budget: Count | None = Field(None, description="maximum number of reasoning tokens")
    thinking_token_budget: Count | None = Field(None, description="vLLM's name of thinking_budget")
    include_reasoning: bool | None = Field(None, description="false: reasoning is generated but not sent")


# vLLM's simple server and its tokenizer routes


class GenerateRequest(RequestFields, SamplingFields):
    """POST /generate."""

    renamed: ClassVar[Renamed] = {"text": "prompt"}

    prompt: str
    n: Count | None = Field(None, description="choices; default: 1")
    max_tokens: Count | None = Field(None, description="per choice; default: 16")
    stream: bool | None = None


class TokenizeRequest(ModelField):
    """POST /tokenize; either a prompt or messages."""

    renamed: ClassVar[Renamed] = {
        "text": "prompt",
        "template_options": "chat_template_kwargs",
        "messages[].reasoning": "messages[].reasoning_content",
    }

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = None
    tools: Annotated[list[ChatTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = Field(
        None, description="with messages"
    )
    add_special_tokens: bool | None = Field(None, description="with a prompt; default: true")
    add_generation_prompt: bool | None = Field(None, description="with messages; default: true")
    chat_template_kwargs: TemplateOptions | None = Field(None, description="with messages")
    return_token_strs: bool | None = None

    continue_final_message: Annotated[Any, Unserved("chat templates close each message", (False,))] = None
    chat_template: Annotated[Any, Unserved("the model's own chat template is used")] = None
    mm_processor_kwargs: Annotated[Any, Unserved(TEXT_ONLY, ({},))] = None


class DetokenizeRequest(ModelField):
    """POST /detokenize."""

    renamed: ClassVar[Renamed] = {"token_ids": "tokens", "token_ids.ids": "tokens"}

    tokens: TokenIds


class LoadAdapterRequest(Body):
    """POST /v1/load_lora_adapter."""

    renamed: ClassVar[Renamed] = {"name": "lora_name", "path": "lora_path"}

    lora_name: str = Field(description="name by which requests choose it as their model")
    lora_path: str = Field(description="absolute path of its folder on the workers")
    load_inplace: bool | None = Field(None, description="true: replace an adapter of that name")


class UnloadAdapterRequest(Body):
    """POST /v1/unload_lora_adapter."""

    renamed: ClassVar[Renamed] = {"name": "lora_name"}

    lora_name: str
    lora_int_id: Annotated[int | None, Field(description="no effect; lora_name selects the adapter")] = None


ADAPTER_MESSAGES = (LoadAdapterRequest, UnloadAdapterRequest)
"""Bodies of routes that are not served by default."""
MESSAGES = (ChatRequest, CompletionRequest, DetokenizeRequest, GenerateRequest, TokenizeRequest)
