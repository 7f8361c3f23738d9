"""Fields of OpenAI and of vLLM that would change an answer and are not served: refused by name, with the reason.

They are listed because clients also send values that ask for nothing, which are accepted. Fields that are listed
nowhere are refused too.
"""

from typing import Annotated, Any

from baton.gateway.messages.base import Body, Unserved

_TEMPLATE = "the model's own chat template is used; chat_template_kwargs sets what it reads"
_TEXT_ONLY = "messages and answers are text"
_STORED = "nothing is stored here"
_NO_TOOLS = "/v1/chat/completions has tools"


class UnservedSampling(Body):
    skip_special_tokens: Annotated[Any, Unserved("special tokens have no text here", (True,))] = None
    spaces_between_special_tokens: Annotated[Any, Unserved("special tokens have no text here", (True,))] = None
    include_stop_str_in_output: Annotated[Any, Unserved("a stop text is no part of the answer", (False,))] = None
    truncate_prompt_tokens: Annotated[Any, Unserved("shorten the prompt, with /tokenize")] = None
    truncation_side: Annotated[Any, Unserved("shorten the prompt, with /tokenize")] = None
    use_beam_search: Annotated[Any, Unserved("gRPC has beam_width", (False,))] = None
    length_penalty: Annotated[Any, Unserved("gRPC has it, for beam search", (1, 1.0))] = None
    early_stopping: Annotated[Any, Unserved("gRPC has it, for beam search", (False,))] = None
    detokenize: Annotated[Any, Unserved("answers are text; return_token_ids adds the ids", (True,))] = None
    logits_processors: Annotated[Any, Unserved("code of clients is not run", ([],))] = None
    return_tokens_as_token_ids: Annotated[Any, Unserved("return_token_ids has the ids", (False,))] = None
    thinking_token_budget: Annotated[Any, Unserved("reasoning is not separated from the answer")] = None
    repetition_detection: Annotated[Any, Unserved("repetition_penalty works against repetition")] = None
    kv_transfer_params: Annotated[Any, Unserved("the router decides where KV goes")] = None
    vllm_xargs: Annotated[Any, Unserved("there are no extensions", ({},))] = None
    guided_whitespace_pattern: Annotated[Any, Unserved("JSON comes without white space")] = None
    structural_tag: Annotated[Any, Unserved("structured_outputs has the forms that are served")] = None


class UnservedChat(Body):
    functions: Annotated[Any, Unserved("tools has functions", ([],))] = None
    function_call: Annotated[Any, Unserved("tool_choice chooses a function")] = None
    modalities: Annotated[Any, Unserved(_TEXT_ONLY, (["text"],))] = None
    audio: Annotated[Any, Unserved(_TEXT_ONLY)] = None
    web_search_options: Annotated[Any, Unserved("nothing is searched")] = None
    moderation: Annotated[Any, Unserved("nothing is moderated")] = None
    verbosity: Annotated[Any, Unserved("ask for it in a message", ("medium",))] = None
    echo: Annotated[Any, Unserved("/v1/completions has it", (False,))] = None
    add_special_tokens: Annotated[Any, Unserved("the chat template writes them", (False,))] = None
    continue_final_message: Annotated[Any, Unserved("/v1/completions continues a text", (False,))] = None
    chat_template: Annotated[Any, Unserved(_TEMPLATE)] = None
    documents: Annotated[Any, Unserved("put them into a message", ([],))] = None
    mm_processor_kwargs: Annotated[Any, Unserved(_TEXT_ONLY, ({},))] = None
    media_io_kwargs: Annotated[Any, Unserved(_TEXT_ONLY, ({},))] = None
    include_reasoning: Annotated[Any, Unserved("reasoning is not separated from the answer", (True,))] = None


class UnservedCompletion(Body):
    suffix: Annotated[Any, Unserved("no model here fills in the middle", ("",))] = None
    prompt_embeds: Annotated[Any, Unserved("a prompt is text or token ids")] = None
    add_special_tokens: Annotated[Any, Unserved("give token ids for a prompt without them", (True,))] = None


class UnservedResponse(Body):
    n: Annotated[Any, Unserved("a response is one answer", (1,))] = None
    previous_response_id: Annotated[Any, Unserved(_STORED)] = None
    conversation: Annotated[Any, Unserved(_STORED)] = None
    prompt: Annotated[Any, Unserved(_STORED)] = None
    background: Annotated[Any, Unserved("an answer goes to the request that asked for it", (False,))] = None
    tools: Annotated[Any, Unserved(_NO_TOOLS, ([],))] = None
    tool_choice: Annotated[Any, Unserved(_NO_TOOLS, ("auto", "none"))] = None
    include: Annotated[Any, Unserved("a response has its text and no more", ([],))] = None
    top_logprobs: Annotated[Any, Unserved("/v1/chat/completions has it", (0,))] = None
    truncation: Annotated[Any, Unserved("a prompt that is too long is refused", ("disabled",))] = None
    context_management: Annotated[Any, Unserved("a prompt that is too long is refused", ([],))] = None
    moderation: Annotated[Any, Unserved("nothing is moderated")] = None


class UnservedMessage(Body):
    """Of one message: no template would show it."""

    refusal: Annotated[Any, Unserved("put the text into content", ("",))] = None
    function_call: Annotated[Any, Unserved("tool_calls has calls")] = None
    audio: Annotated[Any, Unserved(_TEXT_ONLY)] = None
    reasoning: Annotated[Any, Unserved("put the text into content", ("",))] = None
    reasoning_content: Annotated[Any, Unserved("put the text into content", ("",))] = None


class UnservedStructure(Body):
    """Of structured_outputs."""

    whitespace_pattern: Annotated[Any, Unserved("JSON comes without white space")] = None
    structural_tag: Annotated[Any, Unserved("the other forms are served")] = None
    disable_additional_properties: Annotated[Any, Unserved("say additionalProperties in the schema", (False,))] = None


class UnservedStream(Body):
    """Of stream_options."""

    include_obfuscation: Annotated[Any, Unserved("chunks are not padded; use TLS", (False,))] = None


class UnservedReasoning(Body):
    """Of a response's reasoning."""

    summary: Annotated[Any, Unserved("reasoning is not separated from the answer")] = None
    generate_summary: Annotated[Any, Unserved("reasoning is not separated from the answer")] = None


class UnservedTextOptions(Body):
    verbosity: Annotated[Any, Unserved("ask for it in instructions", ("medium",))] = None


class UnservedTokenize(Body):
    continue_final_message: Annotated[Any, Unserved("a chat template ends each message", (False,))] = None
    chat_template: Annotated[Any, Unserved(_TEMPLATE)] = None
    mm_processor_kwargs: Annotated[Any, Unserved(_TEXT_ONLY, ({},))] = None
