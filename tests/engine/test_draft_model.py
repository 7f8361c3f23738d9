"""A model that drafts, from its folder on: what it must share with the other, the memory it takes, and `LLM`."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.engine import LLM, AsyncLLM, SamplingParams
from baton.engine.config.model_config import ModelError
from baton.engine.drafting.draft_model import draft_options
from baton.engine.kv_cache.memory import LargestStep, draft_bytes, prepare_with_spare_memory
from baton.engine.kv_cache.sizing import GPU_RESERVE_BYTES
from baton.engine.prepare import ModelOptions, prepare_model
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.draft_pair import DraftPair, make_draft_pair
from tests.fixtures.metered_rank import ToldMeter
from tests.fixtures.paged import CPU, random_prompt
from tests.fixtures.step_times import drafts_always_pay

MIB = 1 << 20
STEP = LargestStep(tokens=20, sequences=3)
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "quiet": True, "kv_cache_memory_bytes": 64 * MIB}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> DraftPair:
    return make_draft_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def plain(pair: DraftPair) -> ModelOptions:
    return ModelOptions(pair.model, CPU, "float32", 16, 64 * MIB, max_model_len=256)


@pytest.fixture(scope="module")
def drafted(plain: ModelOptions, pair: DraftPair) -> ModelOptions:
    return draft_options(plain, pair.draft, 8 * MIB)


@pytest.mark.parametrize(
    ("different", "reason"),
    [({"vocab_size": 520}, r"520 tokens.* 512"), ({"tokenizer": "byte_fallback"}, "other token ids")],
)
def test_draft_model_with_another_vocabulary_is_rejected_with_both_models_named(
    different: dict[str, Any], reason: str, plain: ModelOptions, tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", **different)
    with pytest.raises(ModelError, match=reason) as refused:
        prepare_model(draft_options(plain, other, MIB))
    assert str(plain.folder) in str(refused.value) and str(other) in str(refused.value)


def test_tokenizer_with_equal_ids_in_another_format_is_accepted(
    drafted: ModelOptions, pair: DraftPair, tmp_path: Path
) -> None:
    same = tmp_path / "same"
    shutil.copytree(pair.draft, same)
    (same / "tokenizer.json").write_text((same / "tokenizer.json").read_text() + "\n")
    prepare_model(draft_options(replace(drafted, draft=None), same, MIB))


def test_draft_model_without_a_tokenizer_is_refused(plain: ModelOptions, pair: DraftPair, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(pair.draft, bare)
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"bare: .*there is no tokenizer"):
        prepare_model(draft_options(plain, bare, MIB))


def test_pool_of_no_blocks_is_refused_in_the_name_of_the_draft_model(plain: ModelOptions, pair: DraftPair) -> None:
    with pytest.raises(ModelError, match=r"the draft model .*kv-memory: 1 bytes"):
        prepare_model(draft_options(plain, pair.draft, 1))


def test_several_ranks_are_refused(drafted: ModelOptions) -> None:
    with pytest.raises(ModelError, match="tensor-parallel is 2; a draft model"):
        prepare_model(replace(drafted, tensor_parallel=2))


def test_draft_model_is_quantised_as_the_other_is_while_it_is_loaded(plain: ModelOptions, pair: DraftPair) -> None:
    prepared = prepare_model(draft_options(replace(plain, quantize="int8"), pair.draft, MIB))
    assert prepared.draft is not None
    assert prepared.draft.weight_format == prepared.weight_format == "int8"


def test_draft_model_does_not_change_block_names(plain: ModelOptions, drafted: ModelOptions) -> None:
    assert prepare_model(drafted).fingerprint == prepare_model(plain).fingerprint


def test_weights_and_kv_of_the_draft_model_reduce_an_automatic_pool(plain: ModelOptions, drafted: ModelOptions) -> None:
    free = 64 * MIB + GPU_RESERVE_BYTES // 2

    def pool_bytes(options: ModelOptions) -> int:
        return prepare_with_spare_memory(options, STEP, 1.0, meter=lambda device: ToldMeter(free)).pool_bytes

    prepared = prepare_model(drafted)
    assert prepared.draft is not None
    taken = draft_bytes(prepared, STEP)
    assert taken > prepared.draft.weight_bytes + prepared.draft.pool_bytes > 8 * MIB
    less = pool_bytes(plain) - pool_bytes(drafted)
    assert abs(less - taken) <= prepared.layout.block_bytes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_of_llm_are_the_same_and_drafts_are_drawn(
    pair: DraftPair, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts_always_pay(monkeypatch)
    params = SamplingParams(temperature=temperature, max_tokens=60, ignore_eos=True)
    prompts = [random_prompt(tokens) for tokens in (5, 60, 33)]
    config = {"method": "draft_model", "model": str(pair.draft), "num_speculative_tokens": 4}
    plain = LLM(str(pair.model), **OPTIONS)
    drafting = LLM(str(pair.model), speculative_config=config, **OPTIONS)
    answers = [
        [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        for llm in (plain, drafting)
    ]
    assert answers[0] == answers[1]
    speculation = drafting._engine.scheduler.speculation
    assert speculation is not None
    assert speculation.done.accepted_tokens > 0.9 * speculation.done.drafted_tokens > 30


async def test_async_llm_drafts_too(pair: DraftPair, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts_always_pay(monkeypatch)
    config = {"method": "draft_model", "model": str(pair.draft)}
    llm = AsyncLLM(str(pair.model), speculative_config=config, **OPTIONS)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    outputs = [output async for output in llm.generate({"prompt_token_ids": random_prompt(20)}, params)]
    assert len(outputs[-1].outputs[0].token_ids) == 60
    speculation = llm._engine.scheduler.speculation
    assert speculation is not None
    assert speculation.done.accepted_tokens > 0
    assert llm.shutdown()


@pytest.mark.parametrize(
    "config",
    [
        {"method": "draft_model"},
        {"method": "ngram", "model": "somewhere"},
        {"method": "draft_model", "model": 3},
        {"method": "eagle", "model": "somewhere"},
        {"method": "draft_model", "model": "somewhere", "num_speculative_tokens": 0},
    ],
)
def test_other_configurations_are_refused(pair: DraftPair, config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"speculative_config is .*draft_model"):
        LLM(str(pair.model), speculative_config=config, **OPTIONS)


def test_missing_folder_is_named(pair: DraftPair) -> None:
    with pytest.raises(ValueError, match="no/such/folder"):
        LLM(str(pair.model), speculative_config={"method": "draft_model", "model": "no/such/folder"}, **OPTIONS)
