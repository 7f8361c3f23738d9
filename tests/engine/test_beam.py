"""Beam search alone, over the logits of transformers' own models, against transformers' generate(num_beams=k)."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.engine.request import TokenLogprob
from baton.engine.sampling.params import candidates_per_beam
from baton.engine.scheduler.beam_search import BeamSearch
from baton.text.sampling import BeamParams, BeamStop
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import random_prompt

EARLY_STOPPING = {BeamStop.UNPROMISING: False, BeamStop.FULL: True, BeamStop.NEVER: "never"}
STEPS = 9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_checkpoint(tmp_path_factory.mktemp("beam"), "llama")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def search(model: Any, prompt: Sequence[int], params: BeamParams, stops: frozenset[int]) -> BeamSearch:
    beams, sequences = BeamSearch(params, STEPS, stops), [list(prompt)]
    count = candidates_per_beam(params.width, stops)
    while not beams.done:
        with torch.inference_mode():
            logprobs = model(torch.tensor(sequences)).logits[:, -1].float().log_softmax(-1)
        top = logprobs.topk(count)
        candidates = [
            [TokenLogprob(*pair) for pair in zip(*row, strict=True)]
            for row in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
        sequences = [[*sequences[each.parent], each.token.token_id] for each in beams.advance(candidates)]
    return beams


def expected(model: Any, prompt: Sequence[int], params: BeamParams, stops: frozenset[int]) -> Any:
    return model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=params.width,
        num_return_sequences=params.width,
        length_penalty=params.length_penalty,
        early_stopping=EARLY_STOPPING[params.stop],
        max_new_tokens=STEPS,
        do_sample=False,
        eos_token_id=sorted(stops) or None,
        pad_token_id=1,
        output_scores=True,
        return_dict_in_generate=True,
    )


def check(model: Any, prompt: Sequence[int], params: BeamParams, stops: frozenset[int]) -> None:
    found = search(model, prompt, params, stops).hypotheses
    wanted = expected(model, prompt, params, stops)
    lists = wanted.sequences[:, len(prompt) :].tolist()
    tokens = [[token.token_id for token in each.tokens] for each in found]
    assert tokens == [row[: len(mine)] for row, mine in zip(lists, tokens, strict=True)]
    assert all(set(row[len(mine) :]) <= {1} for row, mine in zip(lists, tokens, strict=True))  # the rest is padding
    torch.testing.assert_close(
        torch.tensor([each.score for each in found]), wanted.sequences_scores, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("width", "stop"), product((2, 5), BeamStop))
def test_sequences_and_scores_are_those_of_transformers(model: Any, width: int, stop: BeamStop) -> None:
    for seed, penalty in enumerate((0.0, 1.0, 2.0, -1.0)):
        # random weights hardly ever make one certain token: eight tokens of 512 end a beam, so that many do
        stops = frozenset(range(seed, 512, 64))
        check(model, random_prompt(5, seed=seed), BeamParams(width, penalty, stop), stops)


def test_without_stop_tokens_every_beam_reaches_its_length(model: Any) -> None:
    check(model, random_prompt(6), BeamParams(3), frozenset())
    found = search(model, random_prompt(6), BeamParams(3), frozenset()).hypotheses
    assert [len(each.tokens) for each in found] == [STEPS] * 3
    assert not any(each.stopped for each in found)
