"""Each field that is wrong is refused by the name that the client sent, in its own dialect and in our words."""

import re
from typing import Any

import pytest

from tests.router.http.conftest import QWEN3, Gateway
from tests.router.test_template_traces import BARE

CHAT, TEXT, RESPONSES, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"
ANTHROPIC, OLLAMA, OLLAMA_TEXT = "/v1/messages", "/api/chat", "/api/generate"
LIBRARY = re.compile(
    r"Input should|Field required|validation|discriminator|lark|%json|json-schema:|jinja|undefined|_type\b"
)
"""Words of libraries."""
HI = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
FLAT_TOOL = {"type": "function", "name": "f"}
REQUIRED = {"tool_choice": "required"}
FORM = {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}


def tool(parameters: Any, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def parts(role: str, *content: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": list(content)}]


ANSWER = {"role": "assistant", "content": "x"}
Rows = list[tuple[dict[str, Any], str]]
TEXT_ROWS: Rows = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [5, 999]}, "prompt[1]"),
    ({"prompt": [[1, 2], [999]]}, "prompt[1][0]"),
    ({"prompt": [[1, 2], ["a"]]}, "prompt[1][0]"),
    ({"prompt": ["ab", "x" * 2000]}, "prompt[1]"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"suffix": "end"}, "suffix"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 1000}, "n"),
    ({"n": True}, "n"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": 5}, "stop"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1e9}}, "logit_bias[5]"),
    ({"logprobs": 21}, "logprobs"),
    ({"priority": 1000}, "priority"),
    ({"ttft_slo_ms": 1e9}, "ttft_slo_ms"),
    ({"tbt_slo_ms": "fast"}, "tbt_slo_ms"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"model": 5}, "model"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
]
CHAT_ROWS: Rows = [
    ({"tbt_slo_ms": 0}, "tbt_slo_ms"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"prompt_embeds": "x"}, "prompt_embeds"),
    ({"grammar": "x"}, "grammar"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"messages": [{"role": "assistant", "refusal": "no"}]}, "messages[0].refusal"),
    ({"messages": parts("user", {"type": "image_url", "image_url": {}})}, "messages[0].content[0].type"),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages"),
    ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "reasoning_effort"),
    ({"session_id": "x" * 300}, "session_id"),
    ({"prompt_cache_key": "x" * 300}, "prompt_cache_key"),
    ({"session_id": "a", "keep_for_s": 86_401}, "keep_for_s"),
    ({"session_id": "a", "keep_for_s": -1}, "keep_for_s"),
    ({"keep_for_s": 5}, "keep_for_s"),
    ({"done": True}, "done"),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [TOOL]}, "tool_choice.function.name"),
    (REQUIRED, "tool_choice"),
    ({"tool_choice": "sometimes", "tools": [TOOL]}, "tool_choice"),
    ({"tools": [tool({}, "")]}, "tools[0].function.name"),
    ({"tools": [tool({}, "a b")]}, "tools[0].function.name"),
    ({"tools": [TOOL] * 2}, "tools[1].function.name"),
    ({"tools": [{"type": "picture"}]}, "tools[0].type"),
    ({"tools": [tool({"type": "string"})]}, "tools[0].function.parameters.type"),
    ({"tools": [tool({"properties": {"a": {"not": {}}}})], **REQUIRED}, "tools[0].function.parameters"),
    (
        {
            "tools": [
                tool({"properties": {"a": {"type": "string", "minLength": 2, "maxLength": 1}}, "required": ["a"]})
            ],
            **REQUIRED,
        },
        "tools",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": FORM}, "response_format"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": {}, "choice": ["a"]}}, "structured_outputs.choice"),
    ({"guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex"),
    ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": ""}, "guided_grammar"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ({"guided_grammar": 'start: "a"\n%ignore " "', "tools": [TOOL]}, "guided_grammar"),
    ({"guided_regex": "[a"}, "guided_regex"),
    ({"guided_regex": "(", "tools": [TOOL]}, "guided_regex"),
    ({"guided_regex": "(", "tools": [TOOL], **REQUIRED}, "guided_regex"),
    ({"response_format": FORM, "tools": [TOOL]}, "response_format"),
    ({"thinking_budget": 5}, "thinking_budget"),
    ({"continue_final_message": True}, "continue_final_message"),
    (
        {"continue_final_message": True, "add_generation_prompt": True, "messages": [HI, ANSWER]},
        "continue_final_message",
    ),
]
RESPONSES_ROWS: Rows = [
    ({"input": []}, "input"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"content": "x"}]}, "input[0].role"),
    ({"input": [HI, *parts("user", {"type": "input_image"})]}, "input[1].content[0].type"),
    ({"input": parts("user", {"type": "input_text", "text": 5})}, "input[0].content[0].text"),
    ({"input": [{**HI, "nme": 1}]}, "input[0].nme"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"include": ["message.output_text.logprobs"]}, "include[0]"),
    ({"reasoning": {"summary": "concise"}}, "reasoning.summary"),
    ({"tools": [{"type": 5}]}, "tools[0]"),
    ({"tools": [{"type": "custom", "name": "f", "format": {"type": "xml"}}]}, "tools[0].format.type"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]}]}, "tools[0].tools[0].type"),
    ({"tools": [{**FLAT_TOOL, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**FLAT_TOOL, "parameters": {"type": 5}}], **REQUIRED}, "tools[0].parameters.type"),
    (REQUIRED, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "x"}, "tools": [FLAT_TOOL]}, "tool_choice.name"),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]},
         "tools": [FLAT_TOOL]},
        "tool_choice.tools[0].name",
    ),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}}, "text.format"),
    ({"max_output_tokens": 2**33}, "max_output_tokens"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a"),
]  # fmt: skip
ANTHROPIC_ROWS: Rows = [
    ({"tbt_slo_ms": 0}, "tbt_slo_ms"),
    ({"messages": parts("assistant", {"type": "tool_use", "id": "1", "name": "f", "input": {}})}, "messages[0].role"),
    ({"messages": [{"role": "critic", "content": "I"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": parts("user", {"text": "x"})}, "messages[0].content[0].type"),
    ({"messages": parts("user", {"type": "image", "source": {}})}, "messages[0].content[0].type"),
    ({"thinking": {"type": "fast"}}, "thinking.type"),
    ({"tools": [{"type": "custom", "name": "web_search"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"temperature": -1.0}, "temperature"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"metadata": {"user_id": '{"session_id": "' + "x" * 300 + '"}'}}, "metadata.user_id"),
]
OLLAMA_ROWS: Rows = [
    ({"tbt_slo_ms": 0}, "tbt_slo_ms"),
    ({"options": {"temperature": -1.0}}, "options.temperature"),
    ({"options": {"temperature": "x"}}, "options.temperature"),
    ({"options": {"num_predict": 0}}, "options.num_predict"),
    ({"options": {"num_predict": 2**33}}, "options.num_predict"),
    ({"options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
    ({"options": {"stop": [""]}}, "options.stop[0]"),
    ({"options": {"mirostat": 1}}, "options.mirostat"),
    ({"options": {"repeat_last_n": 64}}, "options.repeat_last_n"),
    ({"format": {"type": 5}}, "format"),
    ({"format": "yaml"}, "format"),
    ({"think": True}, "think"),
    ({"think": "low"}, "think"),
    ({"think": "huge"}, "think"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"messages": [{**HI, "images": ["aGk="]}]}, "messages[0].images"),
    ({"session_id": "a" * 300}, "session_id"),
]
OLLAMA_TEXT_ROWS: Rows = [
    ({"suffix": "b"}, "suffix"),
    ({"template": "b"}, "template"),
    ({"images": ["aGk="]}, "images"),
    ({"context": [1]}, "context"),
    ({"raw": True, "system": "b"}, "system"),
    ({"raw": True, "think": True}, "think"),
    ({"raw": True, "top_logprobs": 1}, "top_logprobs"),
    ({"prompt": "a" * 2000}, "prompt"),
    ({"prompt": "a" * 2000, "raw": True}, "prompt"),
]
VECTOR_ROWS: Rows = [
    ({"input": []}, "input"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": ""}, "input[0]"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": [[5], [999]]}, "input[1]"),
    ({"input": [5] * 1025}, "input[0]"),
    ({"dimensions": 0}, "dimensions"),
    ({"dimensions": 4}, "dimensions"),
    ({"priority": 101}, "priority"),
]
REFUSED: dict[str, tuple[dict[str, Any], Rows]] = {
    TEXT: ({"prompt": "a", "max_tokens": 2}, TEXT_ROWS),
    CHAT: ({"messages": [HI], "max_tokens": 4}, CHAT_ROWS),
    RESPONSES: ({"input": "hi"}, RESPONSES_ROWS),
    ANTHROPIC: ({"messages": [HI], "max_tokens": 5}, ANTHROPIC_ROWS),
    OLLAMA: ({"messages": [HI]}, OLLAMA_ROWS),
    OLLAMA_TEXT: ({"prompt": "a"}, OLLAMA_TEXT_ROWS),
    EMBEDDINGS: ({"input": "a"}, VECTOR_ROWS),
}


async def message_of(gateway: Gateway, path: str, body: dict[str, Any], field: str) -> str:
    """The refusal, which names the field."""
    response = await gateway.client.post(path, json=body)
    assert response.status_code == 400, (body, response.text)
    error = response.json()["error"]
    message: str = error if isinstance(error, str) else error["message"]
    assert message.startswith(f"{field}: "), (body, message)
    assert LIBRARY.search(message) is None, message
    if not path.startswith("/api/"):
        assert error["type"] == "invalid_request_error"
        assert path == ANTHROPIC or error["param"] == field
    return message


@pytest.mark.parametrize("path", REFUSED)
async def test_refusal_names_the_field_in_our_words(gateway: Gateway, path: str) -> None:
    body, rows = REFUSED[path]
    for fields, field in rows:
        await message_of(gateway, path, body | fields, field)


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
DROPPED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [HI, {"role": "assistant", "tool_calls": [CALL]}]}, "messages[1].tool_calls"),
    (CHAT, {"messages": [{**HI, "name": "Ann"}]}, "messages[0].name"),
    (CHAT, {"messages": [HI, {**ANSWER, "reasoning_content": "hm"}]}, "messages[1].reasoning_content"),
    (OLLAMA, {"messages": [HI, {**ANSWER, "thinking": "hm"}]}, "messages[1].thinking"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}]}, "input"),
]


async def test_field_that_the_template_drops_is_refused_by_name(gateway: Gateway) -> None:
    await gateway.thinks("x", template=BARE)
    for path, body, field in DROPPED:
        assert f"{field}: this model's chat template" in await message_of(gateway, path, body, field)


THOUGHTS: Rows = [
    ({"thinking_budget": 5, "thinking_token_budget": 6}, "thinking_token_budget"),
    ({"thinking_budget": -1}, "thinking_budget"),
    ({"enable_thinking": True, "reasoning_effort": "none"}, "reasoning_effort"),
]


async def test_fields_of_thoughts_that_contradict_each_other_are_refused(gateway: Gateway) -> None:
    await gateway.thinks("", template=QWEN3)
    for fields, field in THOUGHTS:
        await message_of(gateway, CHAT, {"messages": [HI]} | fields, field)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (OLLAMA, {"messages": [HI], "think": "huge"}, ["think: ", "'low'", "'medium'", "'high'"]),
        (RESPONSES, {"input": [{"type": "video"}]}, ["input[0]: ", "message, function_call, function_call_output"]),
        (EMBEDDINGS, {"input": [5] * 1025}, ["input[0]: 1025 tokens; at most 1024"]),
        (TEXT, {"prompt": "x" * 100_000, "temprature": 0}, ["temprature: unknown field; did you mean temperature?"]),
    ],
)
async def test_rejection_names_accepted_values(
    gateway: Gateway, path: str, body: dict[str, Any], words: list[str]
) -> None:
    error = await gateway.refused(path, **body)
    message = error if isinstance(error, str) else error["message"]
    assert all(word in message for word in words), message
