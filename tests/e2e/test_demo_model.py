"""The demo model reads a table in its prompt: a wrong KV block would be a wrong answer."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from client import AsyncBatonClient
from tests.e2e.conftest import REPOSITORY, run
from tests.e2e.stack import Stack, make_stack

MODEL = REPOSITORY / "models" / "tableqa"
HEAD = (
    "You are a helpful assistant that reads tables. Here is a table.\n"
    "| ID | Name | Age | Occupation | Country |\n|----|------|-----|------------|---------|\n"
)
FIRST = "John Jane Alice Bob Carol Dave Emma Frank Grace Henry Irene Jack Karen Leo Mia Noah Olivia Peter Quinn Rachel".split()
LAST = "Doe Smith Johnson Brown White Green Black Blue Yellow Violet Orange Indigo Red Gray Silver Gold Stone".split()
JOBS = "Engineer Doctor Teacher Lawyer Scientist Nurse Artist Chef Writer Musician Pilot Farmer".split()
LANDS = "USA Canada UK Australia Ireland France Germany Spain Italy Portugal Norway Sweden".split()
ROWS = 20
QUESTIONS = 12
RIGHT_AT_LEAST = 11  # the model's own rate is 40 of 40 over such tables; what counts is that we equal transformers


@pytest.fixture(scope="module")
def table() -> list[tuple[str, int, str, str]]:
    draw = random.Random(20)
    names = [f"{first} {draw.choice(LAST)}" for first in draw.sample(FIRST, ROWS)]
    return [(name, draw.randint(18, 89), draw.choice(JOBS), draw.choice(LANDS)) for name in names]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    yield from run(make_stack(tmp_path_factory.mktemp("demo"), MODEL, worker_flags=["--dtype", "float32"]))


def conversation(table: list[tuple[str, int, str, str]], question: str) -> list[dict[str, str]]:
    rows = "".join(f"| {i + 1} | {name} | {age} | {job} | {land} |\n" for i, (name, age, job, land) in enumerate(table))
    return [{"role": "system", "content": HEAD + rows}, {"role": "user", "content": question}]


def transformers_answer(model: torch.nn.Module, tokenizer: object, messages: list[dict[str, str]]) -> list[int]:
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)  # type: ignore[attr-defined]
    with torch.inference_mode():
        answer = model.generate(**prompt, max_new_tokens=64, do_sample=False)  # type: ignore[operator]
    return [int(token) for token in answer[0, prompt["input_ids"].shape[1] :]]


async def test_answers_about_a_table_are_right_and_equal_transformers(
    demo: Stack, table: list[tuple[str, int, str, str]]
) -> None:
    asked = random.Random(7).sample(table, QUESTIONS)
    expected = {f"How old is {name}?": f"{name} is {age} years old." for name, age, _, _ in asked}
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        AutoTokenizer.from_pretrained(MODEL),
    )
    conversations = [conversation(table, question) for question in expected]
    async with AsyncBatonClient(demo.target, timeout_s=60) as baton:
        answers = await asyncio.gather(*(baton.complete_chat(each, max_tokens=64) for each in conversations))

    for messages, answer in zip(conversations, answers, strict=True):
        assert list(answer.choices[0].token_ids) == transformers_answer(model, tokenizer, messages)
    right = sum(text in answer.choices[0].text for text, answer in zip(expected.values(), answers, strict=True))
    assert right >= RIGHT_AT_LEAST, [answer.choices[0].text for answer in answers]
    demo.wait_idle(within_s=2.0)


async def test_the_second_question_about_a_table_takes_its_blocks_from_the_cache(
    demo: Stack, table: list[tuple[str, int, str, str]]
) -> None:
    name, age, _, _ = table[4]
    async with AsyncBatonClient(demo.target, timeout_s=60) as baton:
        await baton.complete_chat(conversation(table, f"What does {name} do?"), max_tokens=64)
        second = await baton.complete_chat(conversation(table, f"How old is {name}?"), max_tokens=64)

    assert f"{name} is {age} years old." in second.choices[0].text
    assert second.usage.cached_tokens >= second.usage.prompt_tokens // 2


def test_demo_model_is_in_the_repository() -> None:
    assert (MODEL / "model.safetensors").is_file()
    assert Path(MODEL / "README.md").read_text()
