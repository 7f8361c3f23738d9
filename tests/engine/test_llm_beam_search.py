"""`LLM.beam_search` through scheduler and pages, token by token what transformers' generate(num_beams=k) makes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.engine import LLM, BeamSearchParams
from baton.engine.request import RequestTooLong
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import random_prompt

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "quiet": True, "max_model_len": 160, "block_size": 8}
EOS = [2, *range(4, 512, 48)]  # that of the tokenizer, and many, since random weights make hardly any certain token
STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("beams") / "tiny", "qwen3", seed=3)
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        stated = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**stated, "eos_token_id": EOS}))
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), kv_cache_memory_bytes=4 << 20, **OPTIONS)


def expected(reference: Any, prompt: Sequence[int], params: BeamSearchParams) -> Any:
    return reference.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        do_sample=False,
        eos_token_id=None if params.ignore_eos else EOS,
        pad_token_id=1,
        output_scores=True,
        return_dict_in_generate=True,
    )


def check(llm: LLM, reference: Any, prompts: list[list[int]], params: BeamSearchParams) -> None:
    outputs = llm.beam_search(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        wanted = expected(reference, prompt, params)
        lists = [row.tolist() for row in wanted.sequences]
        assert len(output.sequences) == params.beam_width
        for mine, row in zip(output.sequences, lists, strict=True):
            assert mine.tokens == row[: len(mine.tokens)]
            assert set(row[len(mine.tokens) :]) <= {1}
        scores = torch.tensor([each.score for each in output.sequences])
        torch.testing.assert_close(scores, wanted.sequences_scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "params",
    [
        *(
            BeamSearchParams(
                beam_width=width,
                max_tokens=STEPS,
                include_stop_str_in_output=True,
                length_penalty=penalty,
                early_stopping=early,
            )
            for width, penalty, early in (
                (4, 1.0, False),
                (3, 0.0, False),
                (2, -1.0, False),
                (5, 1.0, True),
                (2, 2.0, True),
                (2, 1.0, "never"),
                (5, -1.0, "never"),
            )
        ),
        BeamSearchParams(beam_width=4, max_tokens=STEPS, ignore_eos=True),
    ],
)
def test_many_prompts_together_equal_transformers_one_by_one(
    llm: LLM, reference: Any, params: BeamSearchParams
) -> None:
    shared = random_prompt(24)
    prompts = [random_prompt(7), random_prompt(30), [*shared, 9], [*shared, 10, 11]]
    check(llm, reference, prompts, params)


def test_beams_in_a_pool_too_small_for_all_equal_transformers(llm: LLM, folder: Path, reference: Any) -> None:
    small = LLM(str(folder), kv_cache_memory_bytes=22 * llm.sizing.block_bytes, **OPTIONS)
    params = BeamSearchParams(beam_width=4, max_tokens=STEPS, include_stop_str_in_output=True)
    check(small, reference, [random_prompt(25, seed=seed) for seed in range(3)], params)
    assert small.preemptions > 0


def test_end_of_sequence_token_is_hidden_unless_it_is_asked_for(llm: LLM) -> None:
    prompts = [random_prompt(7, seed=seed) for seed in range(6)]
    shown, hidden = (
        [
            sequence
            for output in llm.beam_search(
                prompts, BeamSearchParams(beam_width=4, max_tokens=STEPS, include_stop_str_in_output=included)
            )
            for sequence in output.sequences
        ]
        for included in (True, False)
    )
    stopped = [each for each in shown if each.finish_reason == "stop"]
    assert stopped and all(each.tokens[-1] in EOS and each.stop_reason == each.tokens[-1] for each in stopped)
    assert [each.tokens[: len(each.tokens) - (each.finish_reason == "stop")] for each in shown] == [
        each.tokens for each in hidden
    ]
    assert [each.cum_logprob for each in shown] == [each.cum_logprob for each in hidden]


def test_text_and_tokens_begin_with_the_prompt_as_in_vllm(llm: LLM) -> None:
    [output] = llm.beam_search(["Badega nomi"], BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True))
    for sequence in output.sequences:
        assert sequence.text == llm.get_tokenizer().decode(sequence.tokens)
        assert sequence.text.startswith("Badega nomi")
        assert sequence.cum_logprob == pytest.approx(sequence.score * 4)
        assert len(sequence.logprobs) == 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"beam_width": 0}, "beam_width: must be at least 1"),
        ({"temperature": 0.7}, "temperature: cannot be combined with beam_width"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"length_penalty": 99.0}, "length_penalty: must be a number from -10 to 10"),
        ({"early_stopping": "maybe"}, "early_stopping is 'maybe'"),
        ({"beam_width": 300}, "n: must be from 1 to 256"),
    ],
)
def test_impossible_value_is_rejected_by_field(llm: LLM, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.beam_search(["Badega"], BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **wrong}))


def test_beams_that_never_fit_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestTooLong, match="beams may need"):
        llm.beam_search([random_prompt(100)], BeamSearchParams(beam_width=200, max_tokens=40))
