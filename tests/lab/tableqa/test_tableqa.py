"""The demo model: training data has the form of the chat template, and it answers about names it never saw."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from baton.lab.tableqa import names, train_data
from baton.lab.tableqa.held_out import main
from baton.lab.tableqa.held_out_cases import FIRST, LAST
from baton.lab.tableqa.tokens import encode
from baton.lab.tableqa.tool_turns import ToolShown, WrittenCall, shown, written
from baton.lab.tableqa.train_data import DialoguePart, answered, said
from baton.router.model.chat_template import chat_template_of
from baton.router.types.request import Message, ToolCall
from baton.text.tokenizer.checkpoint_tokenizer import read_tokenizer

MODEL = Path(__file__).parents[3] / "models" / "tableqa"
MOST_BYTES = 8_000_000
LEAST_RIGHT = 93.0  # percent


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


def test_held_out_names_are_in_no_list_of_training() -> None:
    assert not set(FIRST).intersection(names.FIRST)
    assert not set(LAST).intersection(names.LAST)


def test_people_of_other_names_are_read_right(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["held_out", "--each", "6", "--seed", "5", "--wrong"])
    main()
    printed = capsys.readouterr().out
    score = float(printed.splitlines()[-1].split()[-2])
    assert score >= LEAST_RIGHT, printed


def test_model_is_small() -> None:
    shipped = [MODEL / "model.safetensors", *MODEL.glob("*.json"), MODEL / "chat_template.jinja"]
    assert sum(path.stat().st_size for path in shipped) <= MOST_BYTES


def test_training_writes_dialogues_as_the_template_does() -> None:
    template = chat_template_of(read_tokenizer(MODEL))
    assert template is not None
    tool = ToolShown("lookup", ("name", "field"))
    call = WrittenCall("lookup", [("name", "Zoë O'Neil"), ("field", "age")])
    trained = [
        said("system", "A table."),
        shown([tool, ToolShown("now", ())]),
        said("user", "How old is Zoë O'Neil?"),
        *answered(written(call)),
        said("tool", '{"age": 34}'),
        DialoguePart("<|im_start|>assistant\n", 0.0),
    ]
    properties = {"properties": {key: {"type": "string"} for key in tool.arguments}}
    tools = [
        {"type": "function", "function": {"name": "lookup", "parameters": properties}},
        {"type": "function", "function": {"name": "now"}},
    ]
    messages = [
        Message("system", "A table."),
        Message("user", "How old is Zoë O'Neil?"),
        Message("assistant", "", tool_calls=(ToolCall("call_1", "lookup", json.dumps(dict(call.arguments))),)),
        Message("tool", '{"age": 34}', tool_call_id="call_1"),
    ]
    assert asyncio.run(template.render(messages, tools)) == "".join(part.text for part in trained)


def test_word_has_the_same_tokens_in_a_table_and_in_json(tokenizer: Any) -> None:
    for name in ("Maria Garcia", "José Hernández", "Wei Zhang", "Mei-Ling O'Connor"):
        [row, value, question] = (
            tokenizer(text, add_special_tokens=False).input_ids
            for text in (f"| 1 | {name} | 34 |", f'{{"name":"{name}"', f"How old is {name}?")
        )
        tokens = tokenizer(name, add_special_tokens=False).input_ids
        assert row[3 : 3 + len(tokens)] == value[3 : 3 + len(tokens)] == question[4 : 4 + len(tokens)] == tokens


def test_token_weighs_as_the_part_it_begins_in(tokenizer: Any) -> None:
    tokens, weights = encode(
        tokenizer,
        [
            DialoguePart("| Jane", 0.0),
            DialoguePart(" |", 0.25),
            DialoguePart(" 34", 1.0),
            DialoguePart("", 9.0),
            DialoguePart(".", 0.5),
        ],
    )
    assert [tokenizer.decode([token]) for token in tokens] == ["| ", "Jane", " | ", "34", "."]
    assert weights == [0.0, 0.0, 0.25, 1.0, 0.5]


def test_stranger_is_not_in_the_table() -> None:
    rng = random.Random(3)
    persons = train_data.people(rng, 4, invented=0.5)
    assert len({person.name for person in persons}) == len(persons)
    for _ in range(50):
        assert train_data.stranger(rng, persons, invented=0.5) not in {person.name for person in persons}
