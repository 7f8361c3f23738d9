"""Offline answers that are held to a form, in every way that an engine may make them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import regex

from baton.engine import LLM, SamplingParams, StructuredOutputsParams
from tests.fixtures.checkpoints import make_checkpoint

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "quiet": True}
PROMPTS = [f"{word} nomi" for word in ("Badega", "Ku", "Fe", "Tola", "Ziru")]
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 9999},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "note": {"type": "string", "maxLength": 20},
    },
    "required": ["id", "tags", "note"],
    "additionalProperties": False,
}
JSON = StructuredOutputsParams(json=SCHEMA)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama", seed=11)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}<think>{% if calm %}</think>{% endif %}"
    )
    return folder


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(str(tiny), kv_cache_memory_bytes=8 << 20, max_model_len=256, **OPTIONS)


def answers(llm: LLM, **params: Any) -> list[Any]:
    given: dict[str, Any] = {"max_tokens": 160, "seed": 3, "structured_outputs": JSON, **params}
    return [each for one in llm.generate(PROMPTS, SamplingParams(**given), use_tqdm=False) for each in one.outputs]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"n": 3},
        {"n": 2, "temperature": 1.5, "top_p": 0.9, "logprobs": 2},
        {"temperature": 0.8, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.4, "min_tokens": 150},
    ],
    ids=["greedy", "choices", "hot", "penalties"],
)
def test_random_weights_make_json_that_meets_its_schema(llm: LLM, params: dict[str, Any]) -> None:
    for answer in answers(llm, **params):
        assert answer.finish_reason == "stop", answer.text
        jsonschema.validate(json.loads(answer.text), SCHEMA)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (StructuredOutputsParams(regex="[a-c]{3}-[0-9]{2,4}"), "[a-c]{3}-[0-9]{2,4}"),
        (StructuredOutputsParams(choice=["yes", "no", "may be"]), "yes|no|may be"),
        (StructuredOutputsParams(grammar='start: "(" x ")"\nx: "a" | start "b"'), r"(\(((?1)b|a)\))"),
    ],
)
def test_other_forms(llm: LLM, form: StructuredOutputsParams, pattern: str) -> None:
    for answer in answers(llm, structured_outputs=form, temperature=1.0):
        assert regex.fullmatch(pattern, answer.text, partial=answer.finish_reason == "length"), answer.text


def test_same_tokens_when_answers_give_up_their_kv_in_between(llm: LLM, tiny: Path) -> None:
    block_bytes = 4 * 2 * 2 * 16 * 4 * 32
    small = LLM(str(tiny), kv_cache_memory_bytes=10 * block_bytes, max_model_len=256, **OPTIONS)
    in_small = answers(small, n=2)
    assert small._engine.scheduler.counters.preemptions > 0
    assert [each.token_ids for each in in_small] == [each.token_ids for each in answers(llm, n=2)]


def test_form_cut_by_max_tokens_says_so(llm: LLM) -> None:
    for answer in answers(llm, max_tokens=6):
        assert answer.finish_reason == "length"
        assert answer.text.startswith('{"id":')


def test_stop_string_cuts_it_off(llm: LLM) -> None:
    for answer in answers(llm, stop=[',"tags"']):
        assert (answer.finish_reason, answer.stop_reason) == ("stop", ',"tags"')
        assert regex.fullmatch(r'\{"id":[0-9]{1,4}', answer.text)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"structured_outputs": StructuredOutputsParams(json={"type": "nothing"})}, "must be of array"),
        ({"structured_outputs": StructuredOutputsParams(regex="(a")}, "not a regular expression that can be followed"),
        ({"structured_outputs": StructuredOutputsParams()}, "one of json"),
        ({"structured_outputs": StructuredOutputsParams(regex="a", choice=["a"])}, "one of json"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
    ],
)
def test_invalid_form_is_rejected_before_anything_runs(llm: LLM, params: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        answers(llm, **params)


MESSAGES = [{"role": "user", "content": "Badega nomi"}]


@pytest.mark.parametrize("budget", [0, 7])
def test_thoughts_have_their_budget_and_precede_the_form(llm: LLM, budget: int) -> None:
    form = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, structured_outputs=form)
    params = replace(params, thinking_token_budget=budget)

    [answer] = llm.chat(MESSAGES, params, use_tqdm=False)

    thoughts, close, text = answer.outputs[0].text.partition("</think>")
    assert close and text in ("yes", "no") and thoughts.endswith("\n")
    assert len(answer.outputs[0].token_ids) <= budget + 30 and bool(thoughts.strip()) == bool(budget)


def test_form_begins_immediately_after_closed_thoughts_in_the_prompt(llm: LLM) -> None:
    form = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(max_tokens=60, structured_outputs=form, thinking_token_budget=5)
    [answer] = llm.chat(MESSAGES, params, use_tqdm=False, chat_template_kwargs={"calm": True})
    assert answer.outputs[0].text in ("yes", "no")


def test_budget_of_thoughts_below_0_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="thinking_token_budget: must be a number from 0"):
        llm.chat(MESSAGES, SamplingParams(thinking_token_budget=-1), use_tqdm=False)
