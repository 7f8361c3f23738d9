"""An answer that is cut anywhere and taken up by another engine is the answer that was never cut, to the last bit."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.engine.request import EndReason, Request
from baton.engine.sampling.constraint import Grammars
from baton.engine.sampling.params import SamplingParams
from baton.text.structured.output import StructuredKind, StructuredOutput
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import random_prompt
from tests.fixtures.replay import BLOCK, assert_resumes, assert_same, hashes_of, locally, pulled, resumed

PROMPT = tuple(random_prompt(37))
MAX_TOKENS = 24
CUTS = (1, 2, 3, 2 * BLOCK - len(PROMPT) % BLOCK, 12, MAX_TOKENS - 1)  # the fourth ends a block
SCHEMA = """{"type": "object", "required": ["id", "tags"], "additionalProperties": false, "properties":
{"id": {"type": "integer"}, "tags": {"type": "array", "items": {"enum": ["red", "gruen", "blue"]}, "maxItems": 3}}}"""
PLAIN = SamplingParams(MAX_TOKENS)
DRAWN = SamplingParams(MAX_TOKENS, temperature=0.9, seed=5)
KINDS = {
    "greedy": PLAIN,
    "seeded": DRAWN,
    "choices": replace(DRAWN, n=3),
    "filters": replace(DRAWN, top_k=40, top_p=0.9, min_p=0.01, typical_p=0.95, n=2),
    "penalties": replace(DRAWN, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7, n=2),
    "greedy penalties": replace(PLAIN, repetition_penalty=1.3, presence_penalty=0.9, frequency_penalty=0.7),
    "logprobs": replace(DRAWN, logprobs=3, n=2),
    "bias": replace(PLAIN, logit_bias={9: 4.0, 80: 3.0}),
    "allowed": replace(DRAWN, allowed_token_ids=frozenset(range(5, 60))),
}
PATHS = {"locally": locally, "pulled": pulled, "ahead": partial(locally, ahead=True)}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("replay"), "llama", dtype=request.param)


@pytest.fixture(scope="module")
def grammars(checkpoint: Path) -> Iterator[Grammars]:
    grammars = Grammars(checkpoint, 512, [2])
    yield grammars
    grammars.close()


@pytest.mark.parametrize("path", ["locally", "pulled"])
def test_answer_resumes_at_any_token(checkpoint: Path, path: str) -> None:
    answers = assert_resumes(checkpoint, PROMPT, made(KINDS), CUTS, PATHS[path])
    for kind, choices in answers.items():
        assert [len(answer) for answer in choices] == [MAX_TOKENS] * KINDS[kind].n
    every = [tuple(token.token_id for token in answer) for choices in answers.values() for answer in choices]
    assert len(set(every)) == len(every) - 3, "only seeded, choices and logprobs are drawn alike"


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe", "qwen3_moe"])
def test_answer_of_experts_and_latent_attention_resumes(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family, seed=5)
    some = {kind: KINDS[kind] for kind in ("greedy", "logprobs")}
    for path in ("locally", "pulled"):
        assert_resumes(folder, PROMPT, made(some), CUTS[2:4], PATHS[path])


def test_answer_resumes_with_overlapping_steps(checkpoint: Path) -> None:
    alone = {kind: KINDS[kind] for kind in ("greedy", "choices")}
    assert_resumes(checkpoint, PROMPT, made(alone), CUTS, PATHS["ahead"])


@pytest.mark.parametrize("path", ["locally", "pulled"])
def test_stop_and_bad_words_match_across_the_resumption(checkpoint: Path, path: str) -> None:
    plain = [token.token_id for token in locally(checkpoint, [Request(0, PROMPT, PLAIN, ())])[0, 0]]
    stop = next(token for place, token in enumerate(plain) if place >= 6 and token not in plain[:place])
    words = tuple(tuple(plain[place : place + 2]) for place in (1, 3, 8))
    kinds = {
        "stop": replace(PLAIN, stop_token_ids=frozenset({stop, plain[4]}), min_tokens=6),
        "bad words": replace(PLAIN, bad_words=words),
    }
    answers = assert_resumes(checkpoint, PROMPT, made(kinds), range(1, MAX_TOKENS), PATHS[path])
    [stopped], [other] = answers["stop"], answers["bad words"]
    assert 6 < len(stopped) < MAX_TOKENS
    assert stopped[-1].end is EndReason.STOP
    assert [token.token_id for token in other] != plain


@pytest.mark.parametrize("path", ["locally", "pulled"])
def test_form_is_followed_from_any_token_on(checkpoint: Path, grammars: Grammars, path: str) -> None:
    longer = {"greedy": replace(PLAIN, max_tokens=60), "drawn": replace(DRAWN, max_tokens=60, n=2)}
    kinds = {kind: formed(grammars, params) for kind, params in longer.items()}
    answers = assert_resumes(checkpoint, PROMPT, kinds, range(1, 60, 3), PATHS[path])
    assert any(answer[-1].end is EndReason.STOP and len(answer) > BLOCK for answer in answers["drawn"])


def made(kinds: Mapping[str, SamplingParams]) -> dict[str, Callable[[], SamplingParams]]:
    return {kind: partial(replace, params) for kind, params in kinds.items()}


def formed(grammars: Grammars, params: SamplingParams) -> Callable[[], SamplingParams]:
    output = StructuredOutput(StructuredKind.JSON_SCHEMA, SCHEMA)
    stopping: Any = {"stop_token_ids": frozenset({2})}
    return lambda: replace(params, constraint=grammars.constraint(output, [2]), **stopping)


def test_cached_blocks_of_prompt_and_answer_are_used_and_change_nothing(checkpoint: Path) -> None:
    whole = Request(0, PROMPT, DRAWN, hashes_of(PROMPT))
    answer = locally(checkpoint, [whole])[0, 0]
    again = resumed(whole, answer, MAX_TOKENS - 2, 0, 1)
    assert len(again.block_hashes) > len(whole.block_hashes)
    got = locally(checkpoint, [again, replace(again, request_id=2)])  # the second finds what the first has published
    for number in (1, 2):
        assert_same(got[number, 0], answer[-2:])
