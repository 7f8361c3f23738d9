"""Training dialogues with tools: a call for a question that a tool can answer, then an answer from its result."""

import json
import random
from collections.abc import Sequence
from typing import NamedTuple

from baton.lab.tableqa import names, train_data
from baton.lab.tableqa.table_turns import FIELDS, value_of
from baton.lab.tableqa.train_data import (
    CELL,
    FORM,
    NAME,
    DialoguePart,
    Person,
    absent,
    answered,
    ask,
    said,
    sentence,
    spoken,
)

VERBS = "get find lookup look_up search fetch query read select".split()
NOUNS = "person people table row record employee user member entry".split()
NAME_ARGUMENTS = "name name name person person_name full_name query who q".split()
FIELD_ARGUMENTS = "field column attribute property".split()
OTHERS = (
    ("send_email", ("to", "body")),
    ("get_time", ("zone",)),
    ("add", ("a", "b")),
    ("create_user", ("login",)),
    ("translate", ("text", "language")),
    ("play_music", ("song",)),
)
WEATHER_QUESTIONS = ("What is the weather in {}?", "How is the weather in {}?", "What is the weather like in {}?")
WEATHER = "sunny rainy cloudy windy cold warm hot dry".split()


class ToolShown(NamedTuple):
    name: str
    arguments: Sequence[str]


class WrittenCall(NamedTuple):
    tool: str
    arguments: Sequence[tuple[str, str]]


def shown(tools: Sequence[ToolShown]) -> DialoguePart:
    """Write the tools as the chat template shows them."""
    return said("tools", "".join(f"{tool.name}({', '.join(tool.arguments)})\n" for tool in tools))


def snake(rng: random.Random) -> str:
    noun = names.word(rng).lower() if rng.random() < 0.3 else rng.choice(NOUNS)
    return rng.choice((f"{rng.choice(VERBS)}_{noun}", f"{rng.choice(VERBS)}_{noun}", "lookup", noun, rng.choice(VERBS)))


def lookup_tools(rng: random.Random) -> list[ToolShown]:
    """Draw the tools for people: one for all fields, one with the field as argument, or one for each field."""
    by = rng.choice(NAME_ARGUMENTS)
    draw = rng.random()
    if draw < 0.6:
        return [ToolShown(snake(rng), (by,))]
    if draw < 0.75:
        return [ToolShown(snake(rng), (by, rng.choice(FIELD_ARGUMENTS)))]
    verb = rng.choice(VERBS)
    return [ToolShown(f"{verb}_{field}", (by,)) for field in FIELDS[1:]]


def call_for(kind: int, name: str, tools: Sequence[ToolShown]) -> WrittenCall:
    """Return the tool call for a question. `kind`: index in QUESTIONS. `tools`: tools about people."""
    field = FIELDS[1 + kind % 3]
    tool = tools[FIELDS.index(field) - 1] if len(tools) > 1 else tools[0]
    return WrittenCall(tool.name, [(tool.arguments[0], name), *((argument, field) for argument in tool.arguments[1:])])


def argument_parts(call: WrittenCall) -> list[DialoguePart]:
    parts = [DialoguePart("{", FORM)]
    for place, (argument, value) in enumerate(call.arguments):
        parts += [
            DialoguePart(f'{"," if place else ""}"', FORM),
            DialoguePart(argument, NAME),
            DialoguePart('":"', FORM),
        ]
        parts += [DialoguePart(json.dumps(value, ensure_ascii=False)[1:-1], CELL), DialoguePart('"', 0.3)]
    return [*parts, DialoguePart("}", 0.3)]


def written(call: WrittenCall) -> list[DialoguePart]:
    """Write a call as the model does with `tool_choice` auto."""
    opening = [
        DialoguePart("<tool_call>", CELL),
        DialoguePart('{"name":"', FORM),
        DialoguePart(call.tool, CELL),
        DialoguePart('","arguments":', FORM),
    ]
    return [*opening, *argument_parts(call), DialoguePart("}</tool_call>", FORM)]


def forced(rng: random.Random, call: WrittenCall) -> list[DialoguePart]:
    """Write a call as `tool_choice` forces it: a list of calls, or the arguments of one tool."""
    free = argument_parts(call)
    if rng.random() < 0.5:
        return [DialoguePart("{", 0.0), *free[1:]]
    opening = [DialoguePart('[{"name":"', 0.0), DialoguePart(call.tool, CELL), DialoguePart('","parameters":{', FORM)]
    return [*opening, *free[1:], DialoguePart("}]", NAME)]


def result_of(rng: random.Random, kind: int, person: Person) -> str:
    field = FIELDS[1 + kind % 3]
    row = {key: value_of(person, key) for key in FIELDS}
    row = row if kind == 3 or rng.random() < 0.6 else {field: row[field]}
    if len(row) == 1 and rng.random() < 0.5:
        return str(row[field])
    return json.dumps(row, ensure_ascii=False, separators=rng.choice(((",", ":"), (", ", ": "))))


def person_turn(rng: random.Random, tools: Sequence[ToolShown], invented: float) -> list[DialoguePart]:
    [person] = train_data.people(rng, 1, invented)
    kind = rng.randrange(3) if len(tools) > 1 or len(tools[0].arguments) > 1 else rng.randrange(4)
    call = call_for(kind, person.name, tools)
    question = said("user", ask(rng, train_data.QUESTIONS[kind], person.name))
    if rng.random() < 0.35:
        return [question, *answered(forced(rng, call))]
    parts = [question, *answered(written(call))]
    if rng.random() < 0.2:
        result = rng.choice(("not found", "null", "{}", '{"error": "not found"}', "[]", "unknown"))
        return [*parts, said("tool", result), *answered(absent(person.name))]
    return [*parts, said("tool", result_of(rng, kind, person)), *answered(sentence(kind, person, opening=""))]


def weather_turn(rng: random.Random, tool: ToolShown, invented: float) -> list[DialoguePart]:
    place = names.land(rng, invented)
    call = WrittenCall(tool.name, [(tool.arguments[0], place)])
    question = said("user", rng.choice(WEATHER_QUESTIONS).format(place))
    if rng.random() < 0.35:
        return [question, *answered(forced(rng, call))]
    weather = rng.choice(WEATHER)
    result = weather if rng.random() < 0.5 else json.dumps({"weather": weather})
    answer = [
        DialoguePart("The weather in ", FORM),
        DialoguePart(place, NAME),
        DialoguePart(" is ", FORM),
        DialoguePart(weather, CELL),
        DialoguePart(".", FORM),
    ]
    return [question, *answered(written(call)), said("tool", result), *answered(answer)]


def tool_dialogue(rng: random.Random, rows: int, turns: int, invented: float) -> list[DialoguePart]:
    """Generate a dialogue with tools. `rows`: number of rows of a table in the prompt; 0: no table."""
    people_tools = lookup_tools(rng)
    weather = ToolShown(
        rng.choice(("get_weather", "weather", "get_current_weather")), (rng.choice(("city", "location")),)
    )
    has_weather = rng.random() < 0.4
    others = [ToolShown(*other) for other in rng.sample(OTHERS, rng.choice((0, 0, 1, 2)))]
    tools = [*people_tools, *([weather] if has_weather else []), *others]
    if has_weather and rng.random() < 0.3:
        people_tools, tools = [], [weather, *others]
    rng.shuffle(tools)
    system = [said("system", train_data.any_table(rng, train_data.people(rng, rows, invented), True))] if rows else []
    if not rows and rng.random() < 0.2:
        system = [said("system", "You are a helpful assistant.")]
    parts = [*system, shown(tools)]
    for _ in range(turns):
        draw = rng.random()
        if draw < 0.12:
            parts += spoken(train_data.fact_turn(rng))
        elif people_tools and (draw < 0.75 or not has_weather):
            parts += person_turn(rng, people_tools, invented)
        elif has_weather:
            parts += weather_turn(rng, weather, invented)
    return parts
