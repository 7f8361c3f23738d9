"""Structured output of a prefill and a decode worker is valid, and the same as that of a single engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import regex

from baton.client import AsyncBatonClient, BatonClient, FinishReason, InvalidRequest
from baton.engine import LLM, SamplingParams, StructuredOutputsParams
from tests.e2e.stack import Stack
from tests.fixtures.random_schemas import Verdict, random_schema, verdicts

PROMPT = list(range(40, 90))
SCHEMAS = 8


@pytest.fixture
def baton(stack: Stack) -> Iterator[BatonClient]:
    with BatonClient(stack.target, timeout_s=60) as client:
        yield client


def ask(baton: BatonClient, **options: Any) -> Any:
    return baton.complete(PROMPT, **{"max_tokens": 200, "temperature": 1.0, "seed": 5, **options}).choices


async def test_random_schemas_are_met_in_every_request_form(stack: Stack) -> None:
    async with AsyncBatonClient(stack.target, timeout_s=60) as client:
        found = await verdicts(client, range(SCHEMAS))
    bad: list[Verdict] = [verdict for verdict in found if not verdict.valid]
    assert bad == []
    assert len(found) == 4 * SCHEMAS


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"n": 2}, {"repetition_penalty": 1.3, "min_tokens": 4}])
def test_same_tokens_as_one_engine_makes(baton: BatonClient, tiny_llama: Path, options: dict[str, Any]) -> None:
    """The first token is drawn by the prefill worker, the others by the decode worker."""
    schema = random_schema(23)
    engine = LLM(str(tiny_llama), kv_cache_memory_bytes=4 << 20, max_model_len=512, dtype="float32", quiet=True)
    params = {"max_tokens": 200, "temperature": 1.0, "seed": 5, **options}
    wanted = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema), **params)
    [alone] = engine.generate({"prompt_token_ids": PROMPT}, wanted, use_tqdm=False)
    choices = ask(baton, json_schema=schema, **options)
    assert [list(choice.token_ids) for choice in choices] == [list(each.token_ids) for each in alone.outputs]


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]{2,4}", "n": 3}, "[a-c]{3}-[0-9]{2,4}"),
        ({"choice": ["yes", "no", "may be"], "n": 3}, "yes|no|may be"),
        ({"grammar": 'start: "<" /[xy]{2}/ ">"'}, "<[xy]{2}>"),
        ({"json_object": True}, r"(?s)\{.*"),
    ],
)
def test_every_form(baton: BatonClient, options: dict[str, Any], pattern: str) -> None:
    for choice in ask(baton, **options):
        assert regex.fullmatch(pattern, choice.text), choice.text


def test_answer_of_one_token_ends_in_prefill(baton: BatonClient) -> None:
    [choice] = ask(baton, regex="b?", temperature=0.0)
    assert choice.finish_reason is FinishReason.STOP
    assert choice.text in ("", "b")


def test_form_cut_by_max_tokens_says_so(baton: BatonClient) -> None:
    [choice] = ask(baton, json_schema={"type": "array", "items": {"const": "ba"}, "minItems": 99}, max_tokens=30)
    assert choice.finish_reason is FinishReason.LENGTH
    assert choice.text.startswith('["ba","ba",')


def test_log_probabilities_are_the_models_before_the_form(baton: BatonClient) -> None:
    [choice] = ask(baton, regex="[0-9]{8}", logprobs=2)
    assert choice.logprobs is not None
    tops = [top.token_id for told in choice.logprobs for top in told.top]
    assert set(tops) - set(choice.token_ids), "the likeliest tokens are no digits"


def test_hostile_form_is_refused_in_bounds_and_the_next_is_served(baton: BatonClient) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(baton, regex="(((a{1000}){1000}){1000}){1000}")
    assert caught.value.field == "sampling.regex"
    assert ask(baton, choice=["still here"])[0].text == "still here"
