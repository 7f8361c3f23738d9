"""Prompt log-probabilities, echo, best_of and beam search of a real stack equal transformers, in fp32."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.client import BatonClient, TokenLogprob
from tests.e2e.conftest import run
from tests.e2e.stack import Stack, make_router

PROMPT = [random.Random(8).randrange(3, 512) for _ in range(150)]
STOPS = list(range(7, 512, 40))  # many, since random weights rarely generate one particular token
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def colocated(tiny_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Router that knows only the decode worker of the shared stack, which then computes prompts itself."""
    yield from run(make_router(tmp_path_factory.mktemp("alone"), tiny_stack, ["decode-0"]), workers=1)


@pytest.fixture(params=["two workers", "colocated"])
def baton(stack: Stack, colocated: Stack, request: pytest.FixtureRequest) -> Iterator[BatonClient]:
    target = stack.target if request.param == "two workers" else colocated.target
    with BatonClient(target, timeout_s=60) as client:
        yield client


def check_scores(told: tuple[TokenLogprob, ...] | None, model: Any, prompt: list[int], top: int) -> None:
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    assert told is not None and [each.token_id for each in told] == prompt[1:]
    mine = torch.tensor([each.logprob for each in told])
    torch.testing.assert_close(mine, wanted[range(len(told)), prompt[1:]], rtol=0, atol=TOLERANCE)
    likeliest = torch.tensor([[each.logprob for each in token.top] for token in told])
    torch.testing.assert_close(likeliest, wanted.topk(top).values, rtol=0, atol=TOLERANCE)


def test_logprobs_of_a_prompt_of_several_chunks(baton: BatonClient, model: Any) -> None:
    for _ in range(2):  # the second time, all of it is cached
        answer = baton.complete(PROMPT, max_tokens=3, temperature=0.0, prompt_logprobs=4)
        assert answer.prompt is not None and answer.prompt.token_ids == tuple(PROMPT)
        check_scores(answer.prompt.logprobs, model, PROMPT, top=4)
        assert answer.prompt.text == ""
    plain = baton.complete(PROMPT, max_tokens=3, temperature=0.0)
    assert plain.prompt is None
    assert plain.choices[0].token_ids == answer.choices[0].token_ids


def test_echo_with_logprobs(baton: BatonClient, model: Any, tiny_llama: Path) -> None:
    text = "Badega nomi badega"
    prompt = AutoTokenizer.from_pretrained(tiny_llama)(text)["input_ids"]
    answer = baton.complete(text, max_tokens=3, temperature=0.0, n=2, echo=True, logprobs=2)
    assert answer.prompt is not None and answer.prompt.text == text
    check_scores(answer.prompt.logprobs, model, prompt, top=2)
    assert all(choice.text.startswith(text) for choice in answer.choices)


def test_best_of_six(baton: BatonClient) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": 9, "max_tokens": 12, "ignore_eos": True}
    everything = baton.complete(PROMPT, n=6, logprobs=0, **options)
    best = baton.complete(PROMPT, n=2, best_of=6, **options)
    ranked = sorted(everything.choices, key=lambda each: -sum(token.logprob for token in each.logprobs or ()))
    assert [choice.token_ids for choice in best.choices] == [choice.token_ids for choice in ranked[:2]]
    assert best.usage.completion_tokens == 72
    assert best.choices[0].logprobs is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"beam_width": 4, "n": 4}, {"num_beams": 4}),
        ({"beam_width": 3, "n": 1, "length_penalty": 0.0, "early_stopping": True}, {"num_beams": 3}),
        ({"beam_width": 2, "n": 2, "early_stopping": "never", "logprobs": 0}, {"num_beams": 2}),
    ],
)
def test_beam_search(baton: BatonClient, model: Any, options: dict[str, Any], expected: dict[str, Any]) -> None:
    answer = baton.complete(PROMPT, max_tokens=12, ignore_eos=True, stop_token_ids=STOPS, **options)
    tokens = torch.tensor([PROMPT])
    wanted = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        num_return_sequences=options["n"],
        length_penalty=options.get("length_penalty", 1.0),
        early_stopping=options.get("early_stopping", False),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=STOPS,
        pad_token_id=1,
        **expected,
    )
    for choice, row in zip(answer.choices, wanted[:, len(PROMPT) :].tolist(), strict=True):
        length = len(choice.token_ids)
        assert list(choice.token_ids) == row[:length] and set(row[length:]) <= {1}
        assert (choice.finish_reason.value == "stop") == (choice.token_ids[-1] in STOPS)
        assert (choice.logprobs is not None) == ("logprobs" in options)


def test_beam_search_of_one_token(baton: BatonClient, model: Any) -> None:
    answer = baton.complete(PROMPT, max_tokens=1, ignore_eos=True, beam_width=3, n=3)
    with torch.inference_mode():
        likeliest = model(torch.tensor([PROMPT])).logits[0, -1].topk(3).indices.tolist()
    assert [list(choice.token_ids) for choice in answer.choices] == [[token_id] for token_id in likeliest]
