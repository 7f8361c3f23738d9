"""Requests in the shape of Claude Code 2.1, Codex 0.171 and OpenCode 1.18, and of further versions of them."""

import json
import re
from typing import Any

import pytest

from baton.router.http.dialects import NOT_ACTED_UPON
from tests.router.fake_worker import FakePair
from tests.router.http.conftest import QWEN3, Gateway

ANTHROPIC, COUNT, RESPONSES, CHAT = (
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/chat/completions"),
)
OLLAMA, OLLAMA_TEXT = "/api/chat", "/api/generate"
LONG_OLLAMA = {"options": {"num_predict": 32_000}}
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH = {"name": "Bash", "description": "Run a command.", "input_schema": SCHEMA}
CONTEXT = 1536
MARK = {"type": "ephemeral"}
USER_ID = json.dumps({"device_id": "d", "account_uuid": "", "session_id": "session-1"})


@pytest.fixture
def stopped_pair(stopped_pair: FakePair) -> FakePair:
    """Workers whose context fits an agent's prompt."""
    for worker in stopped_pair.workers:
        worker.info.model.max_model_len = CONTEXT
    return stopped_pair


def claude(*messages: dict[str, Any], billing: str = "cch=1a2b3", **fields: Any) -> dict[str, Any]:
    """A turn of Claude Code."""
    first = {
        "role": "user",
        "content": [{"type": "text", "text": "context"}, {"type": "text", "text": "fix it", "cache_control": MARK}],
    }
    return {
        "model": "tiny",
        "max_tokens": 400,
        "messages": [first, {"role": "system", "content": "agent types"}, *messages],
        "system": [
            {
                "type": "text",
                "text": f"x-anthropic-billing-header: cc_version=2.1.197.1c0; cc_entrypoint=cli; {billing};",
            },
            {"type": "text", "text": "You are an agent.", "cache_control": {**MARK, "ttl": "1h", "scope": "global"}},
        ],
        "tools": [BASH],
        "metadata": {"user_id": USER_ID},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        **fields,
    }


async def listed(gateway: Gateway, path: str, body: dict[str, Any], **headers: str) -> list[str]:
    """Return the fields and tools that an answered request lists as not acted upon."""
    response = await gateway.client.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return [each for each in response.headers.get(NOT_ACTED_UPON, "").split(", ") if each]


async def test_claude_turn_is_answered_and_lists_ignored_fields(gateway: Gateway) -> None:
    beta = {"anthropic-beta": "claude-code-20250219,context-management-2025-06-27"}

    ignored = await listed(gateway, f"{ANTHROPIC}?beta=true", claude(), **beta)

    assert ignored == ["anthropic-beta", "context_management", "thinking", "output_config.effort"]
    prompt = gateway.prompt()
    assert "[system]You are an agent.[user]context\nfix it[system]agent types[assistant]" in prompt
    assert gateway.prefill.kept_session.id


async def test_claude_prompts_are_equal_despite_the_billing_hash(gateway: Gateway) -> None:
    prompts = []
    for billing in ("cch=11111", "cch=22222"):
        body = claude(billing=billing)
        await gateway.post(ANTHROPIC, **body)
        prompts.append(gateway.prompt())
        body["system"] = "\n".join(block["text"] for block in body["system"])
        await gateway.post(ANTHROPIC, **body)
        prompts.append(gateway.prompt())

    assert len(set(prompts)) == 1 and "billing" not in prompts[0]


async def test_claude_tokens_are_counted_as_computed(gateway: Gateway) -> None:
    body = claude()
    await gateway.post(ANTHROPIC, **body)
    computed = len(gateway.prefill.token_ids)
    del body["max_tokens"], body["metadata"]

    assert (await gateway.post(COUNT, **body))["input_tokens"] == computed


async def test_provider_tools_and_their_blocks_are_left_out_and_listed(gateway: Gateway) -> None:
    search = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
    answer = [{"type": "redacted_thinking", "data": "x"}, search, found, {"type": "text", "text": "done"}]
    tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}, BASH]
    turns: list[dict[str, Any]] = [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]

    ignored = await listed(gateway, ANTHROPIC, claude(*turns, tools=tools))

    assert {"tools[0] (web_search_20250305)", "messages (redacted_thinking)", "messages (server_tool_use)"} < {*ignored}
    assert "[assistant]done[user]go on" in gateway.prompt() and "web_search" not in gateway.prompt()


@pytest.mark.parametrize(
    ("kind", "name", "arguments"),
    [
        ("bash_20250124", "bash", {"command": "ls"}),
        ("text_editor_20250124", "str_replace_editor", {"command": "undo_edit", "path": "/a"}),
        (
            "text_editor_20250728",
            "str_replace_based_edit_tool",
            {"command": "insert", "path": "/a", "insert_line": 0, "insert_text": "x"},
        ),
        ("memory_20250818", "memory", {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"}),
    ],
)
async def test_tools_that_anthropics_client_runs_are_described_and_called(
    gateway: Gateway, kind: str, name: str, arguments: dict[str, Any]
) -> None:
    tool = {"type": kind, "name": name, "cache_control": MARK}
    if kind == "text_editor_20250728":
        tool["max_characters"] = 1000
    gateway.says(f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>')

    answer = await gateway.post(ANTHROPIC, **claude(tools=[tool], tool_choice={"type": "tool", "name": name}))

    [call] = answer["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", name, arguments)
    assert answer["stop_reason"] == "tool_use"
    described, _, _ = gateway.prompt().partition("[system]")
    assert all(f'"{argument}"' in described for argument in arguments)


async def test_unknown_version_of_a_client_tool_is_left_out_and_listed(gateway: Gateway) -> None:
    tool = {"type": "bash_20990101", "name": "bash"}

    assert "tools[0] (bash_20990101)" in await listed(gateway, ANTHROPIC, claude(tools=[tool, BASH]))


async def test_deferred_tool_is_described_where_a_result_refers_to_it(gateway: Gateway) -> None:
    hidden = {"name": "Deploy", "input_schema": SCHEMA, "defer_loading": True}
    call = {"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "tool_reference", "tool_name": "Deploy"}],
    }
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    gateway.says('<tool_call>{"name": "Deploy", "arguments": {"command": "up"}}</tool_call>')

    answer = await gateway.post(ANTHROPIC, **claude(*turns, tools=[BASH, hidden]))

    tools, _, rest = gateway.prompt().partition("[system]")
    assert "Deploy" not in tools and '[tool]{"name": "Deploy"' in rest
    assert answer["content"][0]["name"] == "Deploy"


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "adaptive", "display": "omitted"}, True),
        ({"type": "enabled", "budget_tokens": 32}, True),
    ],
)
async def test_thinking_in_every_form_is_accepted(gateway: Gateway, thinking: Any, thinks: bool) -> None:
    await gateway.post(ANTHROPIC, **claude(thinking=thinking))  # a model that never reasons

    await gateway.thinks("ok", template=QWEN3)
    await gateway.post(ANTHROPIC, **claude(thinking=thinking))

    assert ("<think>\n\n</think>" in gateway.prompt()) is not thinks


async def test_min_tokens_beyond_the_context_is_refused_with_the_rest_of_it(gateway: Gateway) -> None:
    error = await gateway.refused(CHAT, **opencode(max_tokens=32_000, min_tokens=16_000))

    assert re.search(r"must be at most \d+, the rest of the context, not 16000", error["message"])


async def test_hundreds_of_tools_are_accepted(gateway: Gateway) -> None:
    tools = [{"name": f"t{number}", "input_schema": {}} for number in range(200)]
    await gateway.thinks("ok", template="{% if tools %}{{ tools | length }}{% endif %}{{ messages[0].content }}")

    await gateway.post(ANTHROPIC, **claude(tools=tools))

    assert gateway.prompt().startswith("200")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (ANTHROPIC, {"content": [{"type": "image", "source": {"type": "base64", "data": ""}}]}),
        (CHAT, {"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}),
        (RESPONSES, {"content": [{"type": "input_image", "image_url": "data:"}]}),
    ],
)
async def test_image_is_refused_by_name(gateway: Gateway, path: str, message: dict[str, Any]) -> None:
    turns = [{"role": "user", **message}]
    body: dict[str, Any] = {"input": turns} if path == RESPONSES else {"messages": turns, "max_tokens": 4}

    error = await gateway.refused(path, **body)

    assert error["message"].endswith("content[0].type: images are not supported: the model reads text only")


async def test_too_long_prompt_is_rejected_in_the_words_claude_reads(gateway: Gateway) -> None:
    error = await gateway.refused(ANTHROPIC, **claude(system="x" * 9000))

    assert error["message"].startswith("prompt is too long: ")


EXEC = {"type": "function", "name": "exec_command", "strict": False, "parameters": SCHEMA}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Tools for agents.",
    "tools": [{"type": "function", "name": "spawn", "parameters": SCHEMA}],
}


def codex(*items: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A turn of Codex."""
    said = [
        {"type": "message", "id": f"msg_{place}", "role": role, "content": [{"type": "input_text", "text": text}]}
        for place, (role, text) in enumerate([("developer", "Be precise."), ("developer", "Skills."), ("user", "go")])
    ]
    return {
        "model": "tiny",
        "input": [*said, *items],
        "tools": [EXEC, PATCH, AGENTS, {"type": "local_shell"}, {"type": "web_search", "external_web_access": True}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "max_output_tokens": 150,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread-1",
        "client_metadata": {"thread_id": "thread-1", "turn_id": "turn-7"},
        **fields,
    }


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_codex_turn_is_answered_and_lists_ignored_fields(gateway: Gateway) -> None:
    ignored = await listed(gateway, RESPONSES, codex())

    assert ignored == ["client_metadata", "include", "tools[4] (web_search)", "reasoning_effort"]
    assert gateway.prefill.kept_session.id
    assert all(name in gateway.prompt() for name in ("exec_command", "apply_patch", "Begin Patch", "agents__spawn"))


async def test_free_text_call_streams_as_custom_tool_call(gateway: Gateway) -> None:
    patch = "*** Begin Patch\n*** Add File: a\n"
    gateway.says(called("apply_patch", input=patch))

    events = await gateway.events(RESPONSES, **codex())

    texts = [event["delta"] for name, event in events if name == "response.custom_tool_call_input.delta"]
    item = events[-1][1]["response"]["output"][0]
    assert "".join(texts) == item["input"] == patch
    assert (item["type"], item["name"], item["status"]) == ("custom_tool_call", "apply_patch", "completed")


async def test_call_of_a_namespace_names_it(gateway: Gateway) -> None:
    gateway.says(called("agents__spawn", command="x"))

    item = (await gateway.post(RESPONSES, **codex()))["output"][0]

    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "agents", "spawn")
    assert json.loads(item["arguments"]) == {"command": "x"}


@pytest.mark.parametrize(("command", "words"), [(["ls", "-l"], ["ls", "-l"]), ("ls -l", ["bash", "-lc", "ls -l"])])
async def test_call_of_the_shell_is_an_action(gateway: Gateway, command: Any, words: list[str]) -> None:
    gateway.says(called("local_shell", command=command, timeout_ms=5))

    item = (await gateway.post(RESPONSES, **codex()))["output"][0]

    assert item["type"] == "local_shell_call"
    assert item["action"] == {"type": "exec", "command": words, "env": {}, "timeout_ms": 5}


async def test_items_of_every_kind_return_as_the_model_wrote_them(gateway: Gateway) -> None:
    items: list[dict[str, Any]] = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done"},
        {
            "type": "function_call",
            "call_id": "c2",
            "namespace": "agents",
            "name": "spawn",
            "arguments": '{"command": 1}',
        },
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok"}]},
        {
            "type": "local_shell_call",
            "call_id": "c3",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"]},
        },
        {"type": "local_shell_call_output", "id": "c3", "output": "a b"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
    ]

    ignored = await listed(gateway, RESPONSES, codex(*items))

    prompt = gateway.prompt()
    assert "input (web_search_call)" in ignored
    assert '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** Begin"}}</tool_call>[tool]Done' in prompt
    assert '{"name": "agents__spawn", "arguments": {"command": 1}}</tool_call>[tool]ok' in prompt
    assert '{"name": "local_shell", "arguments": {"command": ["ls"]}}</tool_call>[tool]a b' in prompt


async def test_websocket_is_answered_with_426_and_models_ignore_the_client_version(gateway: Gateway) -> None:
    upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}

    assert (await gateway.client.get(RESPONSES, headers=upgrade)).status_code == 426
    assert (await gateway.client.get("/v1/models?client_version=0.171.0")).status_code == 200


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
"""A template that shows no tools."""


def opencode(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A turn of OpenCode."""
    said = [{"role": "system", "content": "You are opencode."}, {"role": "user", "content": "say hello"}]
    tool = {"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": SCHEMA}}
    body = {"model": "tiny", "messages": [*said, *messages], "tools": [tool], "tool_choice": "auto", "max_tokens": 200}
    return body | fields


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (ANTHROPIC, claude(max_tokens=32_000)),
        (RESPONSES, codex(max_output_tokens=32_000)),
        (CHAT, opencode(max_tokens=32_000)),
        (OLLAMA, {"messages": [{"role": "user", "content": "hi"}], "stream": False, **LONG_OLLAMA}),
        (OLLAMA_TEXT, {"prompt": "hi", "raw": False, "stream": False, **LONG_OLLAMA}),
        (OLLAMA_TEXT, {"prompt": "hi", "raw": True, "stream": False, **LONG_OLLAMA}),
    ],
)
async def test_max_tokens_beyond_the_context_ends_with_it(gateway: Gateway, path: str, body: dict[str, Any]) -> None:
    await gateway.post(path, **body)

    prefill = gateway.prefill
    assert prefill.sampling.max_tokens == CONTEXT - len(prefill.token_ids)


async def test_tools_are_described_for_a_template_that_shows_none(gateway: Gateway) -> None:
    await gateway.thinks("Now. " + called("bash", command="ls"), template=PLAIN)

    message = (await gateway.post(CHAT, **opencode()))["choices"][0]["message"]

    assert gateway.prompt().startswith("[system]You are opencode.\n\n# Tools")
    assert '{"name": "bash", "description": "Run.", "parameters": {"type": "object"' in gateway.prompt()
    assert message["content"] == "Now."
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "bash", "arguments": '{"command": "ls"}'}]
    assert gateway.process.dispatcher.tool_format == "generic"


@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_calls_and_results_are_text_for_a_template_that_shows_no_tools(gateway: Gateway, choice: str) -> None:
    await gateway.thinks("ok", template=PLAIN)
    calls = [
        {"id": f"c{each}", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
        for each in (1, 2)
    ]
    results = [{"role": "tool", "tool_call_id": f"c{each}", "content": f"result {each}"} for each in (1, 2)]

    await gateway.post(
        CHAT, **opencode({"role": "assistant", "content": None, "tool_calls": calls}, *results, tool_choice=choice)
    )

    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    answers = "\n".join(f"<tool_response>\nresult {each}\n</tool_response>" for each in (1, 2))
    assert gateway.prompt().endswith(f"[assistant]{call}\n{call}[user]{answers}[assistant]")


async def test_forced_call_follows_a_grammar_for_a_template_that_shows_no_tools(gateway: Gateway) -> None:
    await gateway.thinks(called("bash", command="ls"), template=PLAIN)

    answer = await gateway.post(CHAT, **opencode(tool_choice="required"))

    assert '"<tool_call>" "\\n"' in gateway.prefill.sampling.structured.text
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


async def test_changed_prompt_of_a_session_is_found_with_its_words(gateway: Gateway) -> None:
    for request_id, system in (("r1", "It is 12:01."), ("r2", "It is 12:01."), ("r3", "It is 12:02.")):
        messages = [{"role": "system", "content": system + " Be brief." * 20}, {"role": "user", "content": "hi"}]
        await gateway.post(CHAT, messages=messages, max_tokens=4, session_id="s", request_id=request_id, user="u")

    reports = [report for each in ("r1", "r2", "r3") if (report := gateway.process.dispatcher.accounts.find(each))]
    assert [report.not_acted_upon for report in reports] == [("user",)] * 3
    first, second, third = [report.prompt_change for report in reports]
    assert first is second is None
    assert third is not None and third.text.startswith("2. Be brief.")


@pytest.mark.parametrize("path", [CHAT, ANTHROPIC])
async def test_answer_continues_the_last_message(gateway: Gateway, path: str) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}[assistant]"
    await gateway.thinks(" two", template=template)
    turns = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one,"}]
    fields = {"continue_final_message": True} if path == CHAT else {}

    await gateway.post(path, messages=turns, max_tokens=8, **fields)

    assert gateway.prompt() == "[user]count[end][assistant]one,"
