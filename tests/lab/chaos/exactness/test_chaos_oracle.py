"""The oracle accepts exactly the answers of transformers."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.client import Choice, FinishReason
from baton.engine.request import uniform
from baton.lab.chaos.exactness.oracle import Oracle, OracleDisagrees
from baton.lab.chaos.history import ChaosCase, make_cases, stopped
from baton.launch.tiny_checkpoint import write_tiny_checkpoint
from tests.fixtures.sampled import by_reference

TOKENS = 12


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("oracle")
    write_tiny_checkpoint(folder)
    return Oracle(folder)


def answered(oracle: Oracle, case: ChaosCase, choice: int = 0) -> Choice:
    """Generate an answer, greedily or with the reference sampler."""
    made: list[int] = []
    options = case.options
    for offset in range(TOKENS):
        with torch.inference_mode():
            logits = oracle._model(torch.tensor([[*case.prompt, *made]])).logits[:, -1]
        number = uniform(int(options["seed"]), choice, len(case.prompt) + offset)
        wanted = [options["temperature"], options.get("top_k", 0), options.get("top_p", 1.0), number]
        made += by_reference(logits, *(torch.tensor([each], dtype=torch.float64) for each in wanted)).token_ids.tolist()
    return Choice(choice, oracle._text(made), tuple(made), FinishReason.LENGTH, None)


def named(name: str) -> ChaosCase:
    case = next(case for case in make_cases(1, 16, 1) if case.name == name)
    return replace(case, options={**case.options, "max_tokens": TOKENS})


@pytest.mark.parametrize("name", ["greedy 0", "seeded 0", "seeded wide 0", "several 0"])
def test_right_answer_is_expected_and_another_refused(oracle: Oracle, name: str) -> None:
    case = named(name)
    choices = [answered(oracle, case, choice=index) for index in range(case.choices)]
    expected, choice = oracle.expect(case, choices)[-1], choices[-1]
    assert expected.token_ids == choice.token_ids
    place = next(offset for offset in range(4, TOKENS) if offset not in expected.close)
    other = (choice.token_ids[place] + 1) % 259
    wrong = (*choice.token_ids[:place], other, *choice.token_ids[place + 1 :])
    with pytest.raises(OracleDisagrees, match=f"offset {place}"):
        oracle.expect(case, [*choices[:-1], replace(choice, token_ids=wrong)])


@pytest.mark.parametrize("name", ["greedy 0", "seeded 0", "schema 0"])
def test_answer_that_ends_one_token_early_is_refused(oracle: Oracle, name: str) -> None:
    case = named(name)
    choice = answered(oracle, case)
    early = replace(choice, token_ids=choice.token_ids[:-1], text=oracle._text(choice.token_ids[:-1]))
    with pytest.raises(OracleDisagrees, match=f"ended by length with {TOKENS - 1} tokens; max_tokens is {TOKENS}"):
        oracle.expect(case, [early])


@pytest.mark.parametrize(
    ("change", "trouble"),
    [
        ({"text": "another"}, "has the text 'another'"),
        ({"finish_reason": FinishReason.STOP}, "but its next tokens are no stop"),
    ],
)
def test_answer_with_another_text_or_end_is_refused(oracle: Oracle, change: dict[str, Any], trouble: str) -> None:
    case = named("greedy 0")
    with pytest.raises(OracleDisagrees, match=trouble):
        oracle.expect(case, [replace(answered(oracle, case), **change)])


def test_generate_rejects_a_correct_but_short_greedy_answer(oracle: Oracle) -> None:
    case = named("greedy 0")
    [expected] = oracle.expect(case, [answered(oracle, case)])
    with pytest.raises(OracleDisagrees, match=f"at offset {TOKENS - 1}"):
        oracle._generate(case, replace(expected, token_ids=expected.token_ids[:-1]))


@pytest.mark.parametrize("length", [1, 2])
def test_stop_text_ends_an_answer_where_it_first_appears(oracle: Oracle, length: int) -> None:
    """The tokens of the stop text may be sent or not, but its text is not part of the answer."""
    case = named("greedy 0")
    choice = answered(oracle, case)
    text = choice.text
    at = next(
        at for at in range(3, len(text)) if text[at : at + length].isascii() and text.find(text[at : at + length]) == at
    )
    stop = text[at : at + length]
    ended = replace(case, options={**case.options, "stop": [stop]})
    whole = next(n for n in range(TOKENS + 1) if stop in oracle._text(choice.token_ids[:n]))
    end: dict[str, Any] = {"text": text[:at], "finish_reason": FinishReason.STOP, "matched_stop": stop}
    for given in range(whole - length, whole + 1):
        right = replace(choice, token_ids=choice.token_ids[:given], **end)
        oracle.expect(ended, [right])
    for wrong in (replace(right, text=text[: at + 1]), replace(right, matched_stop="?"), choice):
        with pytest.raises(OracleDisagrees):
            oracle.expect(ended, [wrong])


def test_every_choice_is_expected_in_order(oracle: Oracle) -> None:
    case = named("several 0")
    with pytest.raises(OracleDisagrees, match="1 choices, not 3"):
        oracle.expect(case, [answered(oracle, case)])


def test_oracle_counts_tokens_by_who_chose_them(oracle: Oracle) -> None:
    oracle.tally.tokens.clear()
    for name in ("greedy 0", "seeded 0", "schema 0"):
        oracle.expect(named(name), [answered(oracle, named(name))])
    assert oracle.tally.tokens == {"by transformers": TOKENS, "by the second sampler": TOKENS, "by a form": TOKENS}


def test_penalties_equal_transformers(oracle: Oracle) -> None:
    """An answer without penalties is refused if the request has them."""
    case = named("penalties 0")
    choice = answered(oracle, case)  # without penalties
    with pytest.raises(OracleDisagrees):
        oracle.expect(case, [choice])


def test_stop_text_is_one_that_comes_once_and_late() -> None:
    ended = stopped(named("greedy 0"), "abcabcXYabc")
    assert ended is not None
    assert (ended.name, ended.options["stop"]) == ("stop text 0", "cX")
    assert stopped(named("greedy 0"), "aaaaaaaa") is None
