"""A call that is forced has the model's own format: what its grammar lets through is what the format's reader reads."""

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from baton.text.output.forced import ForcedCalls, own_form
from baton.text.output.formats.choose import FORMATS
from baton.text.output.tool_calls import CallsOrForm
from baton.text.structured.library import Vocabulary, compile_form, next_tokens, take_tokens
from baton.text.structured.output import StructuredOutput, json_schema
from tests.text.output.golden_streams import fed

TAGS = [
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "[TOOL_CALLS]",
    "[ARGS]",
]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "sure": {"type": "boolean"}},
    "required": ["city"],
}
PICK = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}
SCHEMAS: Mapping[str, Mapping[str, Any]] = {"weather": CITY, "pick": PICK}
ROME = '{"city": "Rome"}'
WRITTEN = {
    ("hermes", ""): f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>',
    ("llama", ""): f'{{"name": "weather", "parameters": {ROME}}}',
    ("mistral", ""): f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ROME}}}]',
    ("mistral", "[ARGS]"): f"[TOOL_CALLS]weather[ARGS]{ROME}",
    ("pythonic", ""): '[weather(city="Rome")]',
    ("pythonic", "<|python_start|>"): '<|python_start|>[weather(city="Rome")]<|python_end|>',
    ("deepseek", "```json"): "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    + f"{ROME}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ("deepseek", ""): "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    + f"{ROME}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ("glm", ""): "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
    (
        "qwen_coder",
        "",
    ): "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
    ("harmony", ""): "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
    + 'to=functions.weather <|constrain|>json<|message|>{"city":"Rome"}',
}
"""As the templates write a call of `weather`, by format and source."""


def tokenizer_with(tags: bool) -> Tokenizer:
    """Bytes, and the formats' tags as tokens, some special, or as text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    if tags:
        special = sorted({token for each in FORMATS.values() for token in each.special} - {*TAGS})
        made.add_special_tokens(special)
        made.add_tokens([AddedToken(tag, special=False) for tag in TAGS])
    return made


TOKENIZERS = {tags: tokenizer_with(tags) for tags in (True, False)}
VOCABULARIES = {
    tags: Vocabulary(made.to_str(), made.get_vocab_size(), [made.token_to_id("<eos>")])
    for tags, made in TOKENIZERS.items()
}


def form_of(name: str, source: str, tags: bool, several: bool = False) -> StructuredOutput:
    tokens = {token.content: token_id for token_id, token in TOKENIZERS[tags].get_added_tokens_decoder().items()}
    form = own_form(name, ForcedCalls(SCHEMAS, several, source, tokens))
    assert form is not None
    return form


@pytest.mark.parametrize("tags", [True, False], ids=["as tokens", "as text"])
@pytest.mark.parametrize(("name", "source"), WRITTEN)
def test_call_as_the_template_writes_it_is_let_through_and_read(name: str, source: str, tags: bool) -> None:
    text = WRITTEN[name, source]
    if name == "harmony" and not tags:
        text = text[text.index("<|channel|>commentary") :]  # without tokens nothing would end the thought
    matcher = compile_form(form_of(name, source, tags), VOCABULARIES[tags])

    take_tokens(matcher, TOKENIZERS[tags].encode(text, add_special_tokens=False).ids)

    assert matcher.is_accepting()
    events = fed(FORMATS[name].reader(SCHEMAS), [text])
    ((called, arguments),) = [event for event in events if event[0] != "thought"]
    assert called == "weather" and json.loads(arguments) == {"city": "Rome"}


ANSWER = '{"name":"<tool_call> [","sure":true}'
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "sure": {"type": "boolean"}},
    "required": ["name", "sure"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("tags", [True, False], ids=["as tokens", "as text"])
@pytest.mark.parametrize(("name", "source"), WRITTEN)
def test_call_and_form_are_both_allowed_and_distinguished(name: str, source: str, tags: bool) -> None:
    tokenizer = TOKENIZERS[tags]
    tokens = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    form = own_form(name, ForcedCalls(SCHEMAS, True, source, tokens, json_schema(PERSON)))
    assert form is not None
    call, answer = WRITTEN[name, source], ANSWER
    if name == "harmony":
        call = call if tags else call[call.index("<|channel|>commentary") :]
        answer = f"<|channel|>final<|message|>{ANSWER}"
    head = answer.removesuffix(ANSWER)
    for text, letters in ((call, ""), (head, ANSWER)):  # a tag within a text is letters, not a token
        matcher = compile_form(form, VOCABULARIES[tags])
        take_tokens(matcher, tokenizer.encode(text, add_special_tokens=False).ids)
        take_tokens(matcher, [tokenizer.encode(each).ids[0] for each in letters])
        assert matcher.is_accepting(), text
    for size in (1, 3, 1000):
        reader = CallsOrForm(FORMATS[name].reader(SCHEMAS), FORMATS[name].begins)
        assert fed(reader, [answer[at : at + size] for at in range(0, len(answer), size)]) == (("text", ANSWER),)
        reader = CallsOrForm(FORMATS[name].reader(SCHEMAS), FORMATS[name].begins)
        events = fed(reader, [call[at : at + size] for at in range(0, len(call), size)])
        assert [event[0] for event in events if event[0] != "thought"] == ["weather"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "source"), WRITTEN)
def test_every_allowed_text_is_calls_of_the_schema(name: str, source: str, seed: int) -> None:
    drawn, tokenizer, vocabulary = random.Random(seed), TOKENIZERS[True], VOCABULARIES[True]
    tokens = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    form = own_form(name, ForcedCalls({"pick": PICK}, True, source, tokens))
    assert form is not None
    matcher, text = compile_form(form, vocabulary), list[int]()
    while not (matcher.is_accepting() and (drawn.random() < 0.3 or len(text) > 400)):
        bits = next_tokens(matcher)
        allowed = [token for token in range(vocabulary.size) if bits[token >> 3] >> (token & 7) & 1]
        # Tags first where there is a choice: what is thought in channels need not be long.
        tagged = [token for token in allowed if token >= 256 and token not in vocabulary.ends(range(vocabulary.size))]
        endless = len(allowed) > 200
        text.append(drawn.choice(tagged if endless and tagged else allowed))
        if text[-1] == tokenizer.token_to_id("<eos>"):
            text.pop()
            break
        take_tokens(matcher, text[-1:])

    said = tokenizer.decode(text, skip_special_tokens=False)
    calls = [event for event in fed(FORMATS[name].reader({"pick": PICK}), [said]) if event[0] != "thought"]
    assert calls and {called for called, _ in calls} == {"pick"}, said
    for _, arguments in calls:
        read = json.loads(arguments)
        assert isinstance(read["sure"], bool) and read.get("unit", "C") in ("C", "F") and len(read) <= 2, said


@pytest.mark.parametrize("name", ["glm", "qwen_coder", "pythonic"])
def test_arguments_may_be_left_out_as_the_schema_says(name: str) -> None:
    form, tokenizer = form_of(name, "", tags=True), TOKENIZERS[True]
    text = {
        "glm": "<tool_call>weather<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        "qwen_coder": "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "pythonic": "[weather(days=3)]",
    }[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids

    taken = compile_form(form, VOCABULARIES[True]).validate_tokens(ids)

    assert taken < len(ids), "city is required, and comes first"


@pytest.mark.parametrize(
    ("name", "of_city"),
    [
        ("glm", {"type": "string", "pattern": "R.*"}),
        ("qwen_coder", {"anyOf": [{"type": "string"}, {"type": "integer"}]}),
        ("hermes", {"x-guidance": {}}),
    ],
)
def test_inexpressible_format_has_no_form(name: str, of_city: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"city": of_city}}
    if "x-guidance" in of_city:
        schema = {**schema, **of_city}
    assert own_form(name, ForcedCalls({"weather": schema}, False, "", {})) is None


def test_parallel_calls_are_allowed_if_enabled() -> None:
    text = WRITTEN["hermes", ""]
    ids = TOKENIZERS[True].encode(f"{text}\n{text}", add_special_tokens=False).ids
    taken = [
        compile_form(form_of("hermes", "", tags=True, several=several), VOCABULARIES[True]).validate_tokens(ids)
        for several in (True, False)
    ]
    assert taken[0] == len(ids) > taken[1]


def test_model_that_thinks_may_leave_a_line_before_its_call() -> None:
    form = form_of("hermes", "... </think> ...", tags=True)
    ids = TOKENIZERS[True].encode("\n\n" + WRITTEN["hermes", ""], add_special_tokens=False).ids
    assert compile_form(form, VOCABULARIES[True]).validate_tokens(ids) == len(ids)
