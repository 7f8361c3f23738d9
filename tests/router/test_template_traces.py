"""What a chat template drops in silence is refused by its field; what it drops on purpose is not."""

import pytest

from baton.router.model.template_process import CompiledTemplate
from baton.router.model.template_traces import OTHER, NotShown, Traces, find_traces, shown
from baton.router.types.request import Message, ToolCall

QWEN = (
    "{% for m in messages %}{% if m.role == 'user' or m.role == 'system' %}[{{ m.role }}]{{ m.content }}"
    "{% elif m.role == 'assistant' %}[assistant]{% if m.reasoning_content and loop.last %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% for call in m.tool_calls %}{{ call | tojson }}"
    "{% endfor %}{% elif m.role == 'tool' %}[tool]{{ m.content }}{% endif %}{% endfor %}"
)
BARE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant', 'system'] %}{{ raise_exception('') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
CALLS = (ToolCall("1", "f", "{}"),)


@pytest.mark.parametrize(
    ("source", "drops", "refuses"),
    [
        (QWEN, {"developer", OTHER, "name"}, set()),
        (BARE, {"tool_calls", "name", "reasoning"}, set()),
        (STRICT, {"tool_calls", "name", "reasoning"}, {"developer", "tool", OTHER}),
    ],
)
def test_find_traces_distinguishes_dropped_from_rejected_fields(
    source: str, drops: set[str], refuses: set[str]
) -> None:
    found = find_traces(CompiledTemplate(source, {}).attempt)

    assert (found.drops, found.refuses) == (drops, refuses)


def test_developer_becomes_system_if_the_template_knows_only_that() -> None:
    messages = [Message("developer", "be brief"), Message("user", "hi")]

    for source in (QWEN, STRICT):
        traces = find_traces(CompiledTemplate(source, {}).attempt)
        assert shown(messages, traces, source, thinks=False)[0] == Message("system", "be brief")
    assert shown(messages, find_traces(CompiledTemplate(BARE, {}).attempt), BARE, thinks=False) == messages


@pytest.mark.parametrize(
    ("message", "source", "field"),
    [
        (Message("critic", "x"), QWEN, "messages[1].role"),
        (Message("assistant", "", tool_calls=CALLS), BARE, "messages[1].tool_calls"),
        (Message("assistant", "x", name="Ann"), BARE, "messages[1].name"),
        (Message("assistant", "x", reasoning="hm"), BARE, "messages[1].reasoning"),
    ],
)
def test_message_that_leaves_no_trace_is_refused_by_its_field(message: Message, source: str, field: str) -> None:
    traces = find_traces(CompiledTemplate(source, {}).attempt)

    with pytest.raises(NotShown) as lost:
        shown([Message("user", "hi"), message], traces, source, thinks=False)

    assert lost.value.field == field


def test_names_of_results_and_thoughts_of_earlier_turns_are_accepted() -> None:
    thought = Message("assistant", "x", reasoning="hm")
    messages = [Message("user", "hi"), thought, Message("tool", "y", name="f"), Message("user", "so?")]

    for source in (QWEN, BARE):
        traces = find_traces(CompiledTemplate(source, {}).attempt)
        assert shown(messages, traces, source, thinks=True) == messages
    assert shown(messages, Traces(), "", thinks=False) == messages


LATE_SYSTEM = [Message("system", "a"), Message("user", "b"), Message("system", "c"), Message("user", "d")]
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
DROPPING = (
    "{% for m in messages %}{% if m.role == 'user' or loop.first %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
REMINDER = "<system-reminder>\nc\n</system-reminder>"


@pytest.mark.parametrize(
    ("source", "roles", "texts"),
    [
        (BARE, ["system", "user", "system", "user"], ["a", "b", "c", "d"]),
        (FIRST_ONLY, ["system", "user", "user", "user"], ["a", "b", REMINDER, "d"]),
        (DROPPING, ["system", "user", "user", "user"], ["a", "b", REMINDER, "d"]),
        (ALTERNATING, ["user"], [f"a\n\nb\n\n{REMINDER}\n\nd"]),
    ],
)
def test_shown_keeps_order_of_messages_that_the_template_refuses_or_drops(
    source: str, roles: list[str], texts: list[str]
) -> None:
    made = shown(LATE_SYSTEM, find_traces(CompiledTemplate(source, {}).attempt), source, thinks=False)

    assert ([each.role for each in made], [each.content for each in made]) == (roles, texts)
    assert CompiledTemplate(source, {}).attempt([{"role": each.role, "content": each.content} for each in made])
