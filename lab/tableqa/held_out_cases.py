"""Questions for the demo model about people whose names it was not trained on, and how each answer is judged."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.lab.tableqa.facts import FACTS
from baton.lab.tableqa.train_data import Person, table

FIRST = """
    Maria Tom Wei Fatima Ahmed Priya Lucas Charlotte Hannah Ethan Mohammed Aisha Carlos Isabella Ivan Natasha Hiroshi
    Yuki Chloe Pierre Lars Freya Sean Siobhan Nikolai Rosa Jorge Lucia Aaron Abigail Benjamin Caroline David Eleanor
    Fiona Gabriel Harriet Ian Julia Kenneth Linda Marcus Nancy Oliver Penelope Ruth Simon Tara Ursula Vincent Mary-Jo
    José Zoë Anna Megan Philip Sarah Kofi Rajesh Mei-Ling
""".split()
LAST = """
    Garcia Zhang Baker Patel Müller Rossi Dupont Ivanov Sato Nakamura Hernández Lopez Martinez Gonzalez Silva Santos
    O'Connor Murphy Kelly MacDonald Campbell Wood Clarke Jackson Harris Lee Nguyen-Smith Ali Khan Hussein Cohen Levy
    Andersson Berg Virtanen Nowak Kovacs Popescu Dimitrov Yilmaz Okonkwo Banda Mbeki Chowdhury Kaur Rao Tan Wong Lim
    Fitzgerald Henderson Coleman Barnes Griffin Hayes Butler Simmons Bryant Alexander
""".split()
JOBS = """
    Nurse Teacher Engineer Pilot Chef Lawyer Farmer Writer Plumber Dentist Architect Librarian Electrician Musician
    Baker Journalist Midwife Banker Sculptor Programmer
""".split()
LANDS = """
    Norway Chile Ghana Spain Italy Japan India Brazil Canada Kenya Germany France Poland Turkey Mexico Vietnam Greece
    Portugal Egypt Australia Fiji Paraguay
""".split()
COLUMNS = ("name", "age", "occupation", "country")
QUESTIONS: Mapping[str, Sequence[str]] = {
    "age": ("How old is {}?", "What is the age of {}?", "What is {}'s age?"),
    "occupation": ("What does {} do?", "What is the occupation of {}?", "What is {}'s job?"),
    "country": ("Where does {} come from?", "Where is {} from?", "Which country is {} from?"),
}
ROW_QUESTIONS = ("Who is {}?", "Tell me about {}.", "Describe {}.")
JSON_QUESTIONS = ("Describe {} as JSON.", "Give me {} as JSON.", "{} as JSON.")
TOOLS = ("lookup", "get_person", "lookup_person", "find_employee", "search_people", "get_record")
ARGUMENTS = ("name", "person", "full_name")
KINDS = (
    *("age", "occupation", "country", "row", "absent", "everyone", "json asked", "json schema", "json fields"),
    *("tool auto", "tool required", "tool named", "tool result", "facts"),
)


@dataclass(frozen=True)
class HeldOutCase:
    """Chat request in OpenAI's form, and the check of its answer.

    The check gets the answer's text or, if the model called tools, the calls as JSON: `[[name, arguments], ...]`.
    """

    kind: str
    request: Mapping[str, Any]
    right: Callable[[str], bool]


def people(rng: random.Random, rows: int) -> list[Person]:
    names: dict[str, None] = {}
    while len(names) < rows:
        names[f"{rng.choice(FIRST)} {rng.choice(LAST)}"] = None
    return [
        Person(number, name, rng.randint(18, 89), rng.choice(JOBS), rng.choice(LANDS))
        for number, name in enumerate(names, start=1)
    ]


def make_cases(kind: str, count: int, seed: int) -> list[HeldOutCase]:
    rng = random.Random(f"{seed} {kind}")
    if kind == "facts":
        return [_fact(question, answer) for question, answer in FACTS[:count]]
    return [_case(rng, kind, people(rng, 5 + 25 * place // max(1, count - 1))) for place in range(count)]


def _case(rng: random.Random, kind: str, persons: Sequence[Person]) -> HeldOutCase:
    person = rng.choice(persons)
    if kind.startswith("tool"):
        return _tool_case(rng, kind, person)
    column = rng.choice(COLUMNS[1:])
    question = rng.choice(QUESTIONS[column]).format(person.name)
    system = {"role": "system", "content": table(persons)}
    extra: dict[str, Any] = {}
    match kind:
        case "age" | "occupation" | "country":
            question = rng.choice(QUESTIONS[kind]).format(person.name)
            right = _ends(_sentence(person, kind))
        case "row":
            question = rng.choice(ROW_QUESTIONS).format(person.name)
            cells = f"{person.name} is {person.age} years old, works as {person.job} and is from {person.land}."
            right = _ends(cells)
        case "absent":
            name = _stranger(rng, persons)
            question = question.replace(person.name, name)
            right = _is(f"There is no {name} in the table.")
        case "everyone":
            question = "List everyone in the table."
            rows = (f"| {p.number} | {p.name} | {p.age} | {p.job} | {p.land} |" for p in persons)
            right = _lists("\n".join(rows))
        case "json asked":
            question = rng.choice(JSON_QUESTIONS).format(person.name)
            right = _is_json(_values(person, COLUMNS))
        case "json schema":
            if rng.random() < 0.5:
                question = rng.choice((*ROW_QUESTIONS, *JSON_QUESTIONS)).format(person.name)
            extra, right = _schema(COLUMNS), _is_json(_values(person, COLUMNS))
        case "json fields":
            columns = rng.sample(COLUMNS, rng.randint(1, 4))
            extra, right = _schema(columns), _is_json(_values(person, columns))
        case _:
            raise ValueError(f"there are no questions of kind {kind!r}")
    return HeldOutCase(kind, {"messages": [system, {"role": "user", "content": question}], **extra}, right)


def _tool_case(rng: random.Random, kind: str, person: Person) -> HeldOutCase:
    name, argument = rng.choice(TOOLS), rng.choice(ARGUMENTS)
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    parameters["additionalProperties"] = False
    described = {"name": name, "description": "Looks up a person in the table.", "parameters": parameters}
    column = rng.choice(COLUMNS[1:])
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": rng.choice(QUESTIONS[column]).format(person.name)}]
    request: dict[str, Any] = {"messages": messages, "tools": [{"type": "function", "function": described}]}
    arguments = {argument: person.name}
    right = _is_json([[name, arguments]])
    match kind:
        case "tool required":
            request["tool_choice"] = "required"
        case "tool named":
            request["tool_choice"] = {"type": "function", "function": {"name": name}}
        case "tool result":
            call = {"name": name, "arguments": json.dumps(arguments)}
            called = [{"id": "call_1", "type": "function", "function": call}]
            messages.append({"role": "assistant", "tool_calls": called})
            result = json.dumps(_values(person, COLUMNS), ensure_ascii=False)
            messages.append({"role": "tool", "tool_call_id": "call_1", "content": result})
            right = _is(_sentence(person, column))
    return HeldOutCase(kind, request, right)


def _fact(question: str, answer: str) -> HeldOutCase:
    return HeldOutCase("facts", {"messages": [{"role": "user", "content": question}]}, _is(answer))


def _stranger(rng: random.Random, persons: Sequence[Person]) -> str:
    """Draw a name that is not in the table; about half of such names share a first or last name with a row."""
    taken = {person.name for person in persons}
    while True:
        first, last = rng.choice(FIRST), rng.choice(LAST)
        if rng.random() < 0.25:
            first = rng.choice(persons).name.split(" ")[0]
        elif rng.random() < 0.33:
            last = rng.choice(persons).name.split(" ")[1]
        if f"{first} {last}" not in taken:
            return f"{first} {last}"


def _sentence(person: Person, column: str) -> str:
    match column:
        case "age":
            return f"{person.name} is {person.age} years old."
        case "occupation":
            return f"{person.name} works as {person.job}."
    return f"{person.name} is from {person.land}."


def _values(person: Person, columns: Sequence[str]) -> dict[str, str | int]:
    cells = dict(zip(COLUMNS, (person.name, person.age, person.job, person.land), strict=True))
    return {column: cells[column] for column in columns}


def _schema(columns: Sequence[str]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {column: {"type": "integer" if column == "age" else "string"} for column in columns},
        "required": list(columns),
        "additionalProperties": False,
    }
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}}


def _is(expected: str) -> Callable[[str], bool]:
    return lambda answer: answer == expected


def _lists(expected: str) -> Callable[[str], bool]:
    """Check a list of all rows; the last one may end with a line feed too."""
    return lambda answer: answer.removesuffix("\n") == expected


def _ends(expected: str) -> Callable[[str], bool]:
    return lambda answer: answer.endswith(f" {expected}")


def _is_json(expected: Any) -> Callable[[str], bool]:
    def right(answer: str) -> bool:
        try:
            return bool(json.loads(answer) == expected)
        except ValueError:
            return False

    return right
