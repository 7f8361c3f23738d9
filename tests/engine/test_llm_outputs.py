"""What an offline answer looks like: text, reasons to end, log-probabilities, and the errors before anything runs."""

import math
import random
from pathlib import Path
from typing import Any

import pytest

from baton.engine import LLM, SamplingParams
from baton.engine.config.model_config import ModelError
from baton.engine.offline.engine_args import EngineArgs
from baton.engine.offline.prompts import TextDecoder
from tests.fixtures.checkpoints import make_tokenizer

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
PROMPT = "Badega nomi"


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(str(tiny), kv_cache_memory_bytes=4 << 20, max_model_len=128, quiet=True, **OPTIONS)


def one(llm: LLM, **params: Any) -> Any:
    given = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **params}
    [output] = llm.generate(PROMPT, SamplingParams(**given), use_tqdm=False)
    return output.outputs[0]


def test_text_is_the_tokenizers(llm: LLM) -> None:
    answer = one(llm)
    assert answer.text == llm.get_tokenizer().decode(answer.token_ids, skip_special_tokens=True)
    assert (answer.finish_reason, answer.stop_reason, len(answer.token_ids)) == ("length", None, 24)
    assert answer.logprobs is None and answer.cumulative_logprob < 0.0


def test_stop_token_ends_the_answer_but_not_its_text(llm: LLM) -> None:
    free = one(llm)
    stop = free.token_ids[5]
    place = free.token_ids.index(stop)
    answer = one(llm, stop_token_ids=[stop])
    assert answer.token_ids == free.token_ids[: place + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.text == llm.get_tokenizer().decode(free.token_ids[:place], skip_special_tokens=True)


@pytest.mark.parametrize("included", [False, True])
def test_stop_string_ends_text_and_work(llm: LLM, included: bool) -> None:
    free = one(llm)
    stop = free.text[9:13]
    answer = one(llm, stop=["never", stop], include_stop_str_in_output=included)
    place = free.text.index(stop)
    assert answer.text == free.text[: place + len(stop) * included]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert len(answer.token_ids) < len(free.token_ids)


def test_logprobs_are_returned_by_rank(llm: LLM) -> None:
    answer = one(llm, logprobs=3, max_tokens=4)
    for token_id, told in zip(answer.token_ids, answer.logprobs, strict=True):
        assert told[token_id].rank == 1, "greedy draws the likeliest"
        assert sorted(entry.rank for entry in told.values()) == [1, 2, 3]
    chosen = [told[token_id].logprob for token_id, told in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert math.isclose(sum(chosen), answer.cumulative_logprob)


def test_sampling_features_reach_the_engine(llm: LLM) -> None:
    free = one(llm)
    assert set(one(llm, allowed_token_ids=[7, 8]).token_ids) <= {7, 8}
    assert set(one(llm, logit_bias={9: 1000.0}).token_ids) == {9}
    assert free.token_ids[0] not in one(llm, logit_bias={free.token_ids[0]: -1000.0}).token_ids
    assert one(llm, repetition_penalty=5.0).token_ids != free.token_ids


def test_penalties_survive_preemption(tiny: Path) -> None:
    prompts = [[5 + number, 6, 7] for number in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=28, ignore_eos=True, repetition_penalty=1.5, min_tokens=3)
    large = LLM(str(tiny), kv_cache_memory_bytes=4 << 20, max_model_len=64, block_size=8, quiet=True, **OPTIONS)
    kv_bytes = 8 * large.sizing.block_bytes
    small = LLM(str(tiny), kv_cache_memory_bytes=kv_bytes, max_model_len=64, block_size=8, quiet=True, **OPTIONS)
    unhurried, squeezed = (each.generate(prompts, params, use_tqdm=False) for each in (large, small))
    assert (large.preemptions, small.preemptions > 0) == (0, True)
    answers = [[output.outputs[0].token_ids for output in outputs] for outputs in (squeezed, unhurried)]
    assert answers[0] == answers[1]


def test_max_tokens_is_reduced_to_the_context(llm: LLM) -> None:
    [output] = llm.generate([[5] * 120], SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([5] * 128, {}, "prompt: 128 tokens; at most 127"),
        ([9999], {}, "9999 is not a token id"),
        ([5], {"top_p": 2.0}, "top_p"),
        ([5], {"n": 0}, "n: must be from 1 to 256, not 0"),
        ([5], {"stop": ""}, "stop string is empty"),
        ([5], {"n": 1000}, "n: must be from 1 to 256, not 1000"),
    ],
)
def test_bad_input_is_named_and_nothing_runs(llm: LLM, prompt: list[int], params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate([[5, 6], prompt], [SamplingParams(), SamplingParams(**params)], use_tqdm=False)
    assert not llm._engine.scheduler.has_work


def test_start_reports_what_fits(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LLM(str(tiny), kv_cache_memory_bytes=4 << 20, max_model_len=1024, **OPTIONS)
    said = capsys.readouterr().err
    assert "Model weights: " in said
    assert "KV cache: 128 blocks of 32 tokens = 4,096 tokens, 4.0 MiB" in said
    assert "Maximum concurrency for 1,024 tokens per request: 4.00x" in said


def test_too_little_memory_names_the_required_amount(tiny: Path) -> None:
    with pytest.raises(ModelError, match="1024 tokens need 1048576 bytes"):
        LLM(str(tiny), kv_memory=1 << 19, max_model_len=1024, quiet=True, **OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"tensor_parallel_size": 2, "enable_lora": True}, "enable_lora is True"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype"),
        ({"kv_memory": 1, "kv_cache_memory_bytes": 1}, "given under one name"),
        ({"block_size": 0}, "block_size is 0"),
    ],
)
def test_arguments_that_cannot_be_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineArgs(model="x", **options)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_text_token_by_token_equals_the_complete_text(kind: Any) -> None:
    tokenizer = make_tokenizer(512, kind, 100).backend_tokenizer
    decoder, draw = TextDecoder(tokenizer), random.Random(0)
    for _ in range(60):
        token_ids = [draw.randrange(512) for _ in range(30)]
        detokenizer = decoder.detokenizer(skip_special_tokens=True)
        text = "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()
        assert text == tokenizer.decode(token_ids, skip_special_tokens=True)
