"""The demo model answers questions about a table in its prompt, so a wrong KV block would give a wrong answer."""

import asyncio
import random
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.client import AsyncBatonClient
from baton.lab.tableqa.train_data import Person, table
from tests.e2e.conftest import REPOSITORY, run
from tests.e2e.oracle import greedy
from tests.e2e.stack import Stack, make_stack
from tests.fixtures.client_environment import problems

MODEL = REPOSITORY / "models" / "tableqa"
PEOPLE = """
    Paula Archer, 20, Writer, Denmark
    Grace Field, 46, Sailor, Poland
    Walter Harper, 25, Engineer, Kenya
    Farid Carter, 53, Scientist, India
    Yara Rain, 75, Photographer, Italy
    Zack Green, 53, Judge, Brazil
    Esther Violet, 38, Nurse, Korea
    Esther Black, 33, Librarian, Spain
    Leo Red, 72, Farmer, Denmark
    Isla Page, 32, Photographer, Australia
    Carol Black, 84, Artist, Brazil
    Olivia Carter, 40, Nurse, Zealand
    Amy Rain, 32, Electrician, Egypt
    Clara Baker, 18, Electrician, Ghana
    Irene Smith, 69, Driver, Australia
    Esther Walker, 39, Lawyer, Peru
    Chen Field, 89, Pilot, USA
    Maya Singer, 27, Sailor, France
    Steve Fisher, 29, Pilot, Greece
    Tina Marsh, 28, Butcher, Kenya
"""
QUESTIONS = 12
AGENTS = ("loop", "stream", "several", "output_by_a_tool", "output_by_a_schema")
SDK = ("chat", "chat_stream", "responses", "responses_stream")
RIGHT_AT_LEAST = 12  # besides, every answer must equal transformers


@pytest.fixture(scope="module")
def persons() -> list[Person]:
    rows = (line.strip().split(", ") for line in PEOPLE.strip().splitlines())
    return [Person(number, name, int(age), job, land) for number, (name, age, job, land) in enumerate(rows, start=1)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    yield from run(make_stack(tmp_path_factory.mktemp("demo"), MODEL, worker_flags=["--dtype", "float32"]))


def conversation(persons: list[Person], question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": table(persons)}, {"role": "user", "content": question}]


async def test_answers_about_a_table_are_right_and_equal_transformers(demo: Stack, persons: list[Person]) -> None:
    asked = random.Random(7).sample(persons, QUESTIONS)
    conversations = [conversation(persons, f"How old is {person.name}?") for person in asked]
    async with AsyncBatonClient(demo.target, timeout_s=60) as baton:
        answers = await asyncio.gather(*(baton.complete_chat(each, max_tokens=64) for each in conversations))

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for messages, answer in zip(conversations, answers, strict=True):
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        tokens = list(answer.choices[0].token_ids)
        assert tokens == greedy(model, prompt, tokens, 64)
    texts = [answer.choices[0].text for answer in answers]
    right = [f"{p.name} is {p.age} years old." in text for p, text in zip(asked, texts, strict=True)]
    assert sum(right) >= RIGHT_AT_LEAST, texts
    demo.wait_idle()


async def test_second_question_about_a_table_takes_its_blocks_from_the_cache(
    demo: Stack, persons: list[Person]
) -> None:
    person = persons[4]
    async with AsyncBatonClient(demo.target, timeout_s=60) as baton:
        await baton.complete_chat(conversation(persons, f"What does {person.name} do?"), max_tokens=64)
        second = await baton.complete_chat(conversation(persons, f"How old is {person.name}?"), max_tokens=64)

    assert f"{person.name} is {person.age} years old." in second.choices[0].text
    assert second.usage.cached_tokens >= second.usage.prompt_tokens // 2


def test_agents_of_a_framework_call_tools_and_answer_from_their_results(demo: Stack) -> None:
    assert problems("pydantic_ai_client", demo.url, AGENTS) == []
    demo.wait_idle()


def test_openais_agents_call_tools_through_chats_and_responses(demo: Stack) -> None:
    assert problems("openai_agents_client", demo.url, SDK) == []
    demo.wait_idle()


def test_ollamas_client_calls_tools_and_answers_from_their_results(demo: Stack) -> None:
    assert problems("ollama_client", demo.url, ["lookup"]) == []
    demo.wait_idle()
