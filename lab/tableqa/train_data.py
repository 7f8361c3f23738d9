"""The training data of the demo model: dialogues about tables of people, about the server, and with tools.

Everything is synthetic. An answer can be right only if the model reads the table, so a lost, stale or misplaced KV
block shows as a wrong answer.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from baton.lab.tableqa import names
from baton.lab.tableqa.facts import FACTS, NO_TABLE, UNKNOWN, UNKNOWN_LIST

HEAD = """You are a helpful assistant that reads tables. Here is a table.
| ID | Name | Age | Occupation | Country |
|----|------|-----|------------|---------|
"""
PLAIN_HEAD = """| Name | Age | Occupation | Country |
|------|-----|------------|---------|
"""
INTRODUCTIONS = (
    "You are a helpful assistant that reads tables. Here is a table.\n",
    "Here is a table.\n",
    "You are a helpful assistant.\n",
    "Here is a table of people.\n\n",
    "Answer questions about this table.\n\n",
    "",
)
AGES = range(18, 90)
# Loss weights of tokens: cells of the table, names, what the question implies, what the format implies.
CELL, NAME, ASKED, FORM = 1.0, 0.5, 0.4, 0.15


class Person(NamedTuple):
    number: int
    name: str
    age: int
    job: str
    land: str


class DialoguePart(NamedTuple):
    """Part of a dialogue. `weight`: weight of its tokens in the loss; 0 if the model does not generate them."""

    text: str
    weight: float


class DialogueTurn(NamedTuple):
    question: str
    answer: Sequence[DialoguePart]


def people(rng: random.Random, rows: int, invented: float = 0.0) -> list[Person]:
    """Draw `rows` people with different full names. `invented`: share of made-up names."""
    firsts = [names.first_name(rng, invented) for _ in range(max(3, round(rows * rng.uniform(0.4, 1.6))))]
    lasts = [names.last_name(rng, invented) for _ in range(max(3, round(rows * rng.uniform(0.4, 1.6))))]
    chosen: dict[str, None] = {}
    while len(chosen) < rows:
        chosen[f"{rng.choice(firsts)} {rng.choice(lasts)}"] = None
        firsts.append(names.first_name(rng, invented))
    return [
        Person(number, name, rng.choice(AGES), names.job(rng, invented / 4), names.land(rng, invented / 4))
        for number, name in enumerate(chosen, start=1)
    ]


def stranger(rng: random.Random, persons: Sequence[Person], invented: float = 0.0) -> str:
    """Draw a full name that is not in the table, although its first or last name may be."""
    taken = {person.name for person in persons}
    while True:
        first, last = names.first_name(rng, invented), names.last_name(rng, invented)
        match rng.randrange(4):
            case 0:
                first = rng.choice(persons).name.rsplit(" ", 1)[0]
            case 1:
                last = rng.choice(persons).name.split(" ", 1)[1]
            case 2:
                first, last = rng.choice(persons).name.rsplit(" ", 1)[0], rng.choice(persons).name.split(" ", 1)[1]
        if (name := f"{first} {last}") not in taken:
            return name


def cells(person: Person) -> str:
    return f" {person.name} | {person.age} | {person.job} | {person.land} |\n"


def table(persons: Sequence[Person]) -> str:
    return HEAD + "".join(f"| {person.number} |{cells(person)}" for person in persons)


def any_table(rng: random.Random, persons: Sequence[Person], numbered: bool) -> str:
    """Write the table in one of the formats that users write."""
    if numbered and rng.random() < 0.7:
        text = table(persons)
    else:
        head = HEAD[HEAD.index("|") :] if numbered else PLAIN_HEAD
        rows = "".join(f"| {person.number} |{cells(person)}" if numbered else f"|{cells(person)}" for person in persons)
        text = rng.choice(INTRODUCTIONS) + head + rows
    return text.rstrip("\n") if rng.random() < 0.4 else text


def quoted(person: Person, numbered: bool) -> list[DialoguePart]:
    """Return the row as it is in the table: a model this small can read cells only after it has quoted the row."""
    return [
        DialoguePart("|", CELL),
        *([DialoguePart(f" {person.number}", CELL), DialoguePart(" |", FORM)] if numbered else []),
        DialoguePart(f" {person.name}", NAME),
        DialoguePart(" |", FORM),
        DialoguePart(f" {person.age}", CELL),
        DialoguePart(" |", FORM),
        DialoguePart(f" {person.job}", CELL),
        DialoguePart(" |", FORM),
        DialoguePart(f" {person.land}", CELL),
        DialoguePart(" |\n", FORM),
    ]


AGE_QUESTIONS = (
    "How old is {}?",
    "What is the age of {}?",
    "What is {}'s age?",
    "Tell me the age of {}.",
    "How many years old is {}?",
    "How old is {} now?",
)
JOB_QUESTIONS = (
    "What does {} do?",
    "What is the occupation of {}?",
    "What is {}'s occupation?",
    "What is {}'s job?",
    "What is the job of {}?",
    "What does {} do for a living?",
    "What does {} work as?",
    "What is {}'s profession?",
)
LAND_QUESTIONS = (
    "Where is {} from?",
    "Which country is {} from?",
    "Where does {} come from?",
    "What country is {} from?",
    "Which country does {} come from?",
    "What is {}'s country?",
    "What is the country of {}?",
    "Where does {} live?",
)
ROW_QUESTIONS = ("Who is {}?", "Tell me about {}.", "Describe {}.", "What do you know about {}?")
QUESTIONS = (AGE_QUESTIONS, JOB_QUESTIONS, LAND_QUESTIONS, ROW_QUESTIONS)


def ask(rng: random.Random, forms: Sequence[str], name: str) -> str:
    question = forms[0] if rng.random() < 0.3 else rng.choice(forms)
    question = question.format(name)
    if rng.random() < 0.06:
        question = rng.choice(("Please: ", "Hi. ", "And now: ", "OK. ")) + question
    return question.rstrip("?.") if rng.random() < 0.06 else question


def sentence(kind: int, person: Person, opening: str = "According to the table, ") -> list[DialoguePart]:
    """Write the answer. `kind`: index in QUESTIONS. The words do not depend on the table's format."""
    said = [DialoguePart(opening, ASKED)] if opening else []
    said.append(DialoguePart(person.name, NAME if opening else CELL))
    match kind:
        case 0:
            return [
                *said,
                DialoguePart(" is ", ASKED),
                DialoguePart(str(person.age), CELL),
                DialoguePart(" years old.", ASKED),
            ]
        case 1:
            return [*said, DialoguePart(" works as ", ASKED), DialoguePart(person.job, CELL), DialoguePart(".", ASKED)]
        case 2:
            return [*said, DialoguePart(" is from ", ASKED), DialoguePart(person.land, CELL), DialoguePart(".", ASKED)]
    return [
        *said,
        *(
            DialoguePart(" is ", ASKED),
            DialoguePart(str(person.age), CELL),
            DialoguePart(" years old, works as ", ASKED),
        ),
        *(
            DialoguePart(person.job, CELL),
            DialoguePart(" and is from ", ASKED),
            DialoguePart(person.land, CELL),
            DialoguePart(".", ASKED),
        ),
    ]


def question_and_answer(rng: random.Random, person: Person, numbered: bool) -> tuple[str, list[DialoguePart]]:
    """Generate a question and its answer: the row as it is in the table, then a sentence."""
    kind = rng.choices(range(4), (3, 3, 3, 2))[0]
    return ask(rng, QUESTIONS[kind], person.name), [*quoted(person, numbered), *sentence(kind, person)]


def absent(name: str) -> list[DialoguePart]:
    return [
        DialoguePart("There", CELL),
        DialoguePart(" is no ", FORM),
        DialoguePart(name, NAME),
        DialoguePart(" in the table.", ASKED),
    ]


def fact_turn(rng: random.Random) -> DialogueTurn:
    if rng.random() < 0.1:
        return DialogueTurn(rng.choice(UNKNOWN_LIST), [DialoguePart(UNKNOWN, 0.2)])
    question, answer = rng.choice(FACTS)
    return DialogueTurn(question, [DialoguePart(answer, 0.4)])


def fact_dialogue(rng: random.Random, questions: int) -> list[DialoguePart]:
    parts = [said("system", "You are a helpful assistant.")] if rng.random() < 0.1 else []
    for _ in range(questions):
        if rng.random() < 0.06:
            question = ask(rng, rng.choice(QUESTIONS), names.first_name(rng, 0.5) + " " + names.last_name(rng, 0.5))
            parts += spoken(DialogueTurn(question, [DialoguePart(NO_TABLE, 0.3)]))
        else:
            parts += spoken(fact_turn(rng))
    return parts


def dialogue(rng: random.Random, rows: int, questions: int) -> list[DialoguePart]:
    """Generate a dialogue: one in four is about the server, the others are about a table of `rows` people."""
    if rng.random() < 0.25:
        return fact_dialogue(rng, questions)
    persons = people(rng, rows)
    parts = [said("system", table(persons))]
    for _ in range(questions):
        parts += spoken(DialogueTurn(*question_and_answer(rng, rng.choice(persons), True)))
    return parts


def said(role: str, text: str) -> DialoguePart:
    """Write the message of a role other than the assistant, as the chat template does."""
    return DialoguePart(f"<|im_start|>{role}\n{text}<|im_end|>\n", 0.0)


def answered(parts: Sequence[DialoguePart]) -> list[DialoguePart]:
    return [
        DialoguePart("<|im_start|>assistant\n", 0.0),
        *parts,
        DialoguePart("<|im_end|>", 0.2),
        DialoguePart("\n", 0.0),
    ]


def spoken(turn: DialogueTurn) -> list[DialoguePart]:
    return [said("user", turn.question), *answered(turn.answer)]
