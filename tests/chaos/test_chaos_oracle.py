"""The oracle accepts what transformers says and nothing else."""

from dataclasses import replace

import pytest
import torch

from baton.chaos.history import Case, make_cases, stopped
from baton.chaos.oracle import Oracle, OracleDisagrees
from baton.client import Choice, FinishReason
from baton.engine.request import uniform
from baton.launch.tiny_checkpoint import write_tiny_checkpoint
from tests.fixtures.sampled import by_reference

TOKENS = 12


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("oracle")
    write_tiny_checkpoint(folder)
    return Oracle(folder)


def answered(oracle: Oracle, case: Case, choice: int = 0) -> Choice:
    """Token by token: greedy, or by the reference sampler."""
    made: list[int] = []
    options = case.options
    for offset in range(TOKENS):
        with torch.inference_mode():
            logits = oracle._model(torch.tensor([[*case.prompt, *made]])).logits[:, -1]
        number = uniform(int(options["seed"]), choice, len(case.prompt) + offset)
        wanted = [options["temperature"], options.get("top_k", 0), options.get("top_p", 1.0), number]
        made += by_reference(logits, *(torch.tensor([each], dtype=torch.float64) for each in wanted)).token_ids.tolist()
    return Choice(choice, "", tuple(made), FinishReason.LENGTH, None)


def named(name: str) -> Case:
    return next(case for case in make_cases(1, 16, 1) if case.name == name)


@pytest.mark.parametrize("name", ["greedy 0", "seeded 0", "seeded wide 0", "several 0"])
def test_the_right_answer_is_expected_and_another_refused(oracle: Oracle, name: str) -> None:
    case = named(name)
    choice = answered(oracle, case, choice=2 if case.choices > 1 else 0)
    [expected] = oracle.expect(case, [choice])
    assert expected.token_ids == choice.token_ids
    place = next(offset for offset in range(4, TOKENS) if offset not in expected.close)
    other = (choice.token_ids[place] + 1) % 259
    wrong = (*choice.token_ids[:place], other, *choice.token_ids[place + 1 :])
    with pytest.raises(OracleDisagrees, match=f"offset {place}"):
        oracle.expect(case, [replace(choice, token_ids=wrong)])


def test_generate_itself_agrees_with_a_greedy_answer(oracle: Oracle) -> None:
    case = named("greedy 0")
    [expected] = oracle.expect(case, [answered(oracle, case)])
    oracle.generates(case, expected)
    with pytest.raises(OracleDisagrees):
        oracle.generates(case, replace(expected, token_ids=(*expected.token_ids[:-1], 3), close=frozenset()))


def test_penalties_are_those_of_transformers(oracle: Oracle) -> None:
    """Without them the same answer would be refused."""
    case = named("penalties 0")
    choice = answered(oracle, case)  # which knows no penalties
    with pytest.raises(OracleDisagrees):
        oracle.expect(case, [choice])


def test_a_stop_text_is_one_that_comes_once_and_late() -> None:
    ended = stopped(named("greedy 0"), "abcabcXYabc")
    assert ended is not None
    assert (ended.name, ended.options["stop"]) == ("stop text 0", "cX")
    assert stopped(named("greedy 0"), "aaaaaaaa") is None
