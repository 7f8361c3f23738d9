"""Training questions of all kinds about one table: rows, absent rows, JSON, lists, who has which occupation."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from baton.lab.tableqa import names, train_data
from baton.lab.tableqa.train_data import (
    CELL,
    FORM,
    NAME,
    DialoguePart,
    DialogueTurn,
    Person,
    absent,
    ask,
    quoted,
    sentence,
)

JSON_ROW = (
    "{} as JSON.",
    "Give me {} as JSON.",
    "Describe {} as JSON.",
    "Describe {} in JSON.",
    "Answer in JSON: who is {}?",
)
JSON_SHORT = (" Answer in JSON.", " Reply as JSON.", " As JSON.", " Give me JSON.")
JSON_FIELDS = ("Give me the {} of {} as JSON.", "The {} of {} as JSON.", "What is the {} of {}? Answer in JSON.")
LIST_QUESTIONS = (
    "List everyone in the table.",
    "List everyone.",
    "List all people in the table.",
    "Who is in the table?",
    "Tell me everything in the table.",
    "Tell me about everyone in the table.",
    "Repeat the table.",
    "Show me the table.",
)
COUNT_QUESTIONS = ("How many people are in the table?", "How many rows are there?", "How many people are there?")
FIELDS = ("name", "age", "occupation", "country")
SYNONYMS = {
    "name": ("Name", "full_name", "person"),
    "age": ("Age", "years", "age_years"),
    "occupation": ("job", "Occupation", "profession", "work"),
    "country": ("nationality", "Country", "origin", "from", "home"),
}


class Form(NamedTuple):
    """Format of an answer. `forced`: structured output writes the keys, so the model generates only the values."""

    keys: Sequence[tuple[str, str]]  # JSON key and the field that it stands for
    forced: bool
    texts: bool = False  # True: the age is a string too


def value_of(person: Person, field: str) -> str | int:
    values: dict[str, str | int] = {"name": person.name, "age": person.age}
    return (values | {"occupation": person.job, "country": person.land})[field]


def json_object(person: Person, form: Form) -> list[DialoguePart]:
    """Write an object without white space, as structured output does."""
    given = 0.0 if form.forced else FORM
    parts = [DialoguePart("{", 0.0 if form.forced else CELL)]
    for place, (key, field) in enumerate(form.keys):
        value = value_of(person, field)
        parts += [DialoguePart("," if place else "", 0.3), DialoguePart(f"{json.dumps(key)}:", given)]
        if isinstance(value, int) and not form.texts:
            parts.append(DialoguePart(str(value), CELL))
        else:
            text = json.dumps(str(value), ensure_ascii=False)[1:-1]
            parts += [
                DialoguePart('"', given),
                DialoguePart(text, NAME if field == "name" and not form.forced else CELL),
                DialoguePart('"', 0.3),
            ]
    return [*parts, DialoguePart("}", 0.3)]


def asked_json(rng: random.Random, person: Person) -> DialogueTurn:
    """Generate a question that asks for JSON with certain fields."""
    draw = rng.random()
    if draw < 0.5:
        question = ask(rng, JSON_ROW, person.name)
        keys: Sequence[str] = FIELDS
    elif draw < 0.7:
        kind = rng.randrange(3)
        question = rng.choice(train_data.QUESTIONS[kind]).format(person.name) + rng.choice(JSON_SHORT)
        keys = ("name", FIELDS[kind + 1])
    else:
        keys = rng.sample(FIELDS, rng.randint(1, 3))
        listed = ", ".join(keys[:-1]) + " and " + keys[-1] if len(keys) > 1 else keys[0]
        question = rng.choice(JSON_FIELDS).format(listed, person.name)
    return DialogueTurn(question, json_object(person, Form([(key, key) for key in keys], forced=False)))


def forced_json(rng: random.Random, person: Person) -> DialogueTurn:
    """Ask any question about the person, with a schema of some of the fields in any order."""
    if rng.random() < 0.5:
        question = asked_json(rng, person).question
    else:
        question = ask(rng, rng.choice(train_data.QUESTIONS), person.name)
    fields: Sequence[str] = FIELDS if rng.random() < 0.4 else rng.sample(FIELDS, rng.randint(1, 4))
    plain = rng.random() < 0.75
    keys = [(field if plain or rng.random() < 0.5 else rng.choice(SYNONYMS[field]), field) for field in fields]
    return DialogueTurn(question, json_object(person, Form(keys, forced=True, texts=rng.random() < 0.15)))


def bare_value(rng: random.Random, person: Person) -> DialogueTurn:
    """Answer with the value alone, for answers restricted to a list of choices."""
    kind = rng.randrange(3)
    question = ask(rng, train_data.QUESTIONS[kind], person.name)
    return DialogueTurn(question, [DialoguePart(str(value_of(person, FIELDS[kind + 1])), CELL)])


def reverse(rng: random.Random, persons: Sequence[Person], numbered: bool) -> DialogueTurn | None:
    """Ask who has an occupation, or comes from a country, that only one row has."""
    by_job = rng.random() < 0.5
    counted = Counter(person.job if by_job else person.land for person in persons)
    alone = [person for person in persons if counted[person.job if by_job else person.land] == 1]
    if not alone:
        return None
    person = rng.choice(alone)
    if not by_job:
        form = rng.choice(("Who is from {}?", "Who comes from {}?"))
        return DialogueTurn(form.format(person.land), [*quoted(person, numbered), *sentence(2, person)])
    word = person.job.lower() if person.job in names.JOBS and rng.random() < 0.5 else person.job
    form = rng.choice(("Who is the {}?", "Who works as {}?", "Who is a {}?"))
    return DialogueTurn(form.format(word), [*quoted(person, numbered), *sentence(1, person)])


def listing(rng: random.Random, persons: Sequence[Person], numbered: bool) -> DialogueTurn:
    """Ask for a list of all rows as the table has them: the longest answers."""
    parts: list[DialoguePart] = []
    for person in persons:
        parts += [DialoguePart("|", FORM), *quoted(person, numbered)[1:]]
    question = LIST_QUESTIONS[0] if rng.random() < 0.4 else rng.choice(LIST_QUESTIONS)
    return DialogueTurn(question, parts)


def json_listing(rng: random.Random, persons: Sequence[Person]) -> DialogueTurn:
    parts = [DialoguePart("[", CELL)]
    for person in persons:
        parts += [DialoguePart("," if len(parts) > 1 else "", FORM)]
        parts += json_object(person, Form([(key, key) for key in FIELDS], forced=False))
    return DialogueTurn(rng.choice(LIST_QUESTIONS) + rng.choice(JSON_SHORT), [*parts, DialoguePart("]", NAME)])


def counting(rng: random.Random, persons: Sequence[Person]) -> DialogueTurn:
    said = [
        DialoguePart("There", CELL),
        DialoguePart(" are ", FORM),
        DialoguePart(str(len(persons)), CELL),
        DialoguePart(" people in the table.", FORM),
    ]
    return DialogueTurn(rng.choice(COUNT_QUESTIONS), said)


def unknown_name(rng: random.Random, persons: Sequence[Person], invented: float) -> DialogueTurn:
    name = train_data.stranger(rng, persons, invented)
    if rng.random() < 0.25:
        someone = Person(0, name, 0, "", "")
        return DialogueTurn(asked_json(rng, someone).question, absent(name))
    return DialogueTurn(ask(rng, rng.choice(train_data.QUESTIONS), name), absent(name))


def table_turn(rng: random.Random, persons: Sequence[Person], numbered: bool, invented: float) -> DialogueTurn:
    person = rng.choice(persons)
    draw = rng.random()
    if draw < 0.14:
        return unknown_name(rng, persons, invented)
    if draw < 0.28:
        return asked_json(rng, person)
    if draw < 0.50:
        return forced_json(rng, person)
    if draw < 0.52:
        return bare_value(rng, person)
    if draw < 0.55:
        return reverse(rng, persons, numbered) or asked_json(rng, person)
    if draw < 0.57:
        return train_data.fact_turn(rng)
    if draw < 0.58 and numbered:
        return counting(rng, persons)
    return DialogueTurn(*train_data.question_and_answer(rng, person, numbered))
