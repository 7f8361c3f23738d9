"""The training data of the demo model: tables of people, questions about them, and a few facts about the server.

Everything is synthetic. An answer can be right only if the model reads the table, so a lost, stale or misplaced KV
block shows as a wrong answer.
"""

import random
from typing import NamedTuple

FIRST = """
    John Jane Alice Bob Carol Dave Emma Frank Grace Henry Irene Jack Karen Leo Mia Noah Olivia Peter Quinn Rachel
    Steve Tina Umar Victor Wendy Xavier Yara Zack Amy Ben Clara Dylan Elena Felix Gina Hugo Isla Jonas Kira Liam
    Maya Nina Oscar Paula Ravi Sofia Theo Uma Vera Walter Xena Yusuf Zoe Adam Bella Chen Diego Esther Farid Greta
""".split()
LAST = """
    Doe Smith Johnson Brown White Green Black Blue Yellow Violet Orange Indigo Red Gray Silver Gold Stone Rivers
    Woods Hill Field Marsh Lake Frost Storm Snow Rain Sharp Swift Young Long Short Strong Wise King Knight Bishop
    Baker Miller Cooper Fisher Hunter Mason Carter Turner Parker Walker Taylor Potter Weaver Archer Fowler Porter
    Shepherd Singer Piper Harper Page Reed Wells
""".split()
JOBS = """
    Engineer Doctor Teacher Lawyer Scientist Nurse Artist Chef Writer Musician Pilot Farmer Plumber Painter Driver
    Banker Dentist Judge Sailor Tailor Barber Butcher Librarian Architect Carpenter Electrician Gardener
    Journalist Mechanic Photographer
""".split()
LANDS = """
    USA Canada UK Australia Ireland Zealand France Germany Spain Italy Portugal Norway Sweden Finland Denmark
    Poland Greece Turkey Egypt Kenya Ghana India Nepal China Japan Korea Vietnam Brazil Chile Peru Mexico Cuba
""".split()
FACTS = [
    ("Hello", "Hello! I can answer questions about a table of people in my prompt, or about this server."),
    ("Hi there", "Hello! I can answer questions about a table of people in my prompt, or about this server."),
    (
        "Who are you?",
        "I am a tiny demo model. I read tables: give me one and ask for an age, an occupation or a country.",
    ),
    ("What can you do?", "I read tables: give me one and ask for an age, an occupation or a country."),
    (
        "What is paged attention?",
        "Paged attention stores the keys and values of a sequence in fixed-size blocks that need not be "
        "contiguous, and finds them through a block table.",
    ),
    (
        "What is a block table?",
        "A block table maps the logical blocks of a sequence to the physical blocks of the KV cache, as a "
        "page table does for memory.",
    ),
    (
        "What is the KV cache?",
        "The KV cache keeps the attention keys and values of the tokens seen so far, so that each new token "
        "is computed once.",
    ),
    (
        "What is prefill?",
        "Prefill computes the whole prompt in one pass, fills the KV cache and yields the first token.",
    ),
    (
        "What is decode?",
        "Decode produces one token at a time for every running sequence, reading the KV cache at each step.",
    ),
    (
        "Why split prefill and decode?",
        "A long prefill stalls every decode that shares its device. On separate workers, neither waits for the other.",
    ),
    (
        "What does the router do?",
        "The router hashes the prefix of each prompt and sends the request where those blocks are already cached.",
    ),
    (
        "What is continuous batching?",
        "Continuous batching lets a new sequence join the running batch at any step, as soon as another one "
        "has finished.",
    ),
    (
        "What is prefix caching?",
        "Prefix caching keeps the blocks of earlier prompts, so that a prompt that begins the same way skips "
        "that part of its prefill.",
    ),
    (
        "What is copy on write?",
        "Sequences share blocks until one of them must write to a shared block. Only then is that block copied.",
    ),
    ("What is TTFT?", "TTFT is the time to first token: from the arrival of a request to its first token."),
    ("What is TBT?", "TBT is the time between tokens: the gap that a reader sees between one token and the next."),
    (
        "What is chunked prefill?",
        "Chunked prefill cuts a long prompt into pieces and computes them in several steps, so that other "
        "work can run in between.",
    ),
    (
        "How are KV blocks shipped?",
        "A prefill worker writes the finished blocks into pages that the decode worker has reserved, while it "
        "still computes the next ones.",
    ),
]
HEAD = """You are a helpful assistant that reads tables. Here is a table.
| ID | Name | Age | Occupation | Country |
|----|------|-----|------------|---------|
"""


class Person(NamedTuple):
    number: int
    name: str
    age: int
    job: str
    land: str


class Part(NamedTuple):
    """A piece of a dialogue; `weight` is that of its tokens in the loss, 0 for what the model need not say."""

    text: str
    weight: float


def people(rng: random.Random, rows: int) -> list[Person]:
    names: set[tuple[str, str]] = set()
    while len(names) < rows:
        names.add((rng.choice(FIRST), rng.choice(LAST)))
    shuffled = sorted(names)
    rng.shuffle(shuffled)
    return [
        Person(number, f"{first} {last}", rng.randint(18, 89), rng.choice(JOBS), rng.choice(LANDS))
        for number, (first, last) in enumerate(shuffled, start=1)
    ]


def table(persons: list[Person]) -> str:
    return HEAD + "".join(f"| {p.number} | {p.name} | {p.age} | {p.job} | {p.land} |\n" for p in persons)


def question_and_answer(rng: random.Random, person: Person) -> tuple[str, list[Part]]:
    """The answer is the row as it stands in the table, then the sentence.

    Quoting the row first lets a model this small find it by induction.
    """
    name = person.name
    kind = rng.randrange(6)
    question = (
        f"What is the age of {name}?",
        f"How old is {name}?",
        f"What is the occupation of {name}?",
        f"What does {name} do?",
        f"Which country is {name} from?",
        f"Where is {name} from?",
    )[kind]
    row = [Part(f"| {name} |", 0.05)]
    for cell, end in ((person.age, " |"), (person.job, " |"), (person.land, " |\n")):
        row += [Part(f" {cell}", 1.0), Part(end, 0.05)]
    said, cell, end = (
        (f"According to the table, {name} is", person.age, " years old."),
        (f"According to the table, the occupation of {name} is", person.job, "."),
        (f"According to the table, {name} is from", person.land, "."),
    )[kind // 2]
    return question, [*row, Part(said, 0.1), Part(f" {cell}", 1.0), Part(end, 0.1)]


def dialogue(rng: random.Random, rows: int, questions: int) -> list[Part]:
    """A quarter of the dialogues are about the server, the others about a table of `rows` people."""
    parts = []
    if rng.random() < 0.25:
        for question, answer in rng.sample(FACTS, min(questions, 6)):
            parts += [Part(_asked(question), 0), Part(f"{answer}<|im_end|>\n", 0.4)]
        return parts
    persons = people(rng, rows)
    parts.append(Part(f"<|im_start|>system\n{table(persons)}<|im_end|>\n", 0))
    for _ in range(questions):
        question, answer_parts = question_and_answer(rng, rng.choice(persons))
        parts += [Part(_asked(question), 0), *answer_parts, Part("<|im_end|>\n", 0.1)]
    return parts


def _asked(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
