"""Models that keep a state beside keys and values: what lies in a block moves, is found, goes on, to the last bit."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import ModelError
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.layout import BLOCK_TOKENS, kv_layout
from baton.engine.kv_cache.swap_space import SwapSpace
from baton.engine.load import check_parallel
from baton.engine.parallel.shard import shard_config, shard_layout
from baton.engine.prepare import ModelOptions, prepare_model
from baton.engine.request import BlockCopy, Chunk, NonFinite, Plan, Request, Sample
from baton.engine.runner.runner import HostPool, Runner
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import CPU, PagedModel, answered, random_prompt, token_ids, unlikely
from tests.fixtures.replay import BLOCK, assert_resumes, assert_same, hashes_of, locally, pulled, resumed

PROMPT = tuple(random_prompt(37))
MAX_TOKENS = 20
CUTS = (1, 2 * BLOCK - len(PROMPT) % BLOCK, 12)  # the second ends a block
GREEDY = SamplingParams(MAX_TOKENS)
DRAWN = SamplingParams(MAX_TOKENS, temperature=0.9, seed=5)


@pytest.fixture(scope="module", params=["qwen3_5_text", "lfm2", "granitemoehybrid", "nemotron_h"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hybrid"), request.param, seed=1)


@pytest.fixture
def divisible(tmp_path: Path) -> Path:
    """Return a checkpoint whose states can be divided among ranks."""
    return make_checkpoint(tmp_path, "qwen3_5_text", seed=1)


@pytest.fixture(scope="module")
def paged(checkpoint: Path) -> PagedModel:
    return PagedModel(checkpoint, BLOCK, blocks=256, packed=True)


def test_experts_of_qwen3_5_equal_transformers(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_5_moe_text", seed=2)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [random_prompt(length, seed=length) for length in (1, 40, 90)]
    for prompt, answer in zip(prompts, PagedModel(folder).greedy(prompts, 30, chunk_tokens=17), strict=True):
        assert unlikely(expected, prompt, answer) == []


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("path", [locally, pulled, partial(locally, ahead=True)], ids=["locally", "pulled", "ahead"])
def test_answer_resumes_at_any_token(checkpoint: Path, path: object) -> None:
    assert callable(path)
    kinds = {"greedy": lambda: GREEDY, "choices": lambda: replace(DRAWN, n=3)}
    answers = assert_resumes(checkpoint, PROMPT, kinds, CUTS, path)
    assert [[len(answer) for answer in choices] for choices in answers.values()] == [[MAX_TOKENS], [MAX_TOKENS] * 3]


@pytest.mark.usefixtures("native_kernels")
def test_bfloat16_answer_resumes_at_any_token(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_5_text", seed=1, dtype="bfloat16")
    assert_resumes(folder, PROMPT, {"greedy": lambda: GREEDY, "choices": lambda: replace(DRAWN, n=3)}, CUTS, pulled)


@pytest.mark.usefixtures("native_kernels")
def test_cached_blocks_of_prompt_and_answer_are_used_and_change_nothing(checkpoint: Path) -> None:
    answer = locally(checkpoint, [Request(0, PROMPT, DRAWN, hashes_of(PROMPT))])[0, 0]
    again = resumed(Request(0, PROMPT, DRAWN, hashes_of(PROMPT)), answer, MAX_TOKENS - 2, 0, 1)
    got = locally(checkpoint, [again, replace(again, request_id=2)])  # the second finds what the first has published
    for number in (1, 2):
        assert_same(got[number, 0], answer[-2:])


def test_chunks_of_any_size_leave_the_same_bytes_in_a_block(paged: PagedModel, native_kernels: None) -> None:
    prompt, ways = random_prompt(45, seed=4), ((45,), (1, 7, 2, 8, 20, 7), (1,) * 45)
    tables = [paged.blocks(len(prompt)) for _ in ways]
    for table, way in zip(tables, ways, strict=True):
        start = 0
        for tokens in way:
            paged.logits([Chunk(0, prompt[start : start + tokens], start, table)])
            start += tokens
    for blocks in zip(*tables, strict=True):
        assert paged.kv.states is not None
        states = paged.kv.states[:, : paged.layout.state_numbers]
        for block in blocks[1:]:
            assert torch.equal(states[block], states[blocks[0]])


def test_newest_token_may_be_computed_again(paged: PagedModel) -> None:
    """As after a mask that was late."""
    prompt = random_prompt(BLOCK * 2 + 1, seed=5)
    for tokens in (BLOCK * 2 - 3, BLOCK * 2, BLOCK * 2 + 1):  # within a block, its last, and the first of another
        table = paged.blocks(tokens)
        [first] = paged.logits([Chunk(0, prompt[:tokens], 0, table)])
        newest = Chunk(0, prompt[tokens - 1 : tokens], tokens - 1, table)
        again = [paged.logits([newest])[0] for _ in range(2)]
        torch.testing.assert_close(again[0], first[-1:], atol=1e-4, rtol=0)
        assert torch.equal(again[0], again[1])


def test_state_after_other_tokens_is_never_gone_on_from(paged: PagedModel) -> None:
    prompt, table = random_prompt(12, seed=6), paged.blocks(12)
    paged.logits([Chunk(0, prompt[:11], 0, table)])
    chunk = Chunk(0, prompt[9:10], 9, table, (Sample(0, GREEDY),))
    [result] = paged.runner.run(Plan((chunk,)))
    assert isinstance(result, NonFinite)


def test_copied_block_has_the_state(paged: PagedModel) -> None:
    prompt, [source], [copy] = random_prompt(6, seed=7), paged.blocks(1), paged.blocks(1)
    paged.logits([Chunk(0, prompt[:5], 0, [source])])
    sample, own = (Sample(0, GREEDY),), Chunk(0, prompt[5:], 5, [source])
    results = paged.runner.run(
        Plan(
            (own._replace(samples=sample), own._replace(samples=sample, block_table=[copy])), (BlockCopy(source, copy),)
        )
    )
    assert results[0] == results[1]


def test_swapped_answers_equal_those_of_a_large_pool(checkpoint: Path, paged: PagedModel) -> None:
    prompts = [random_prompt(30, seed=number) for number in range(5)]
    blocks, slots = 24, 40
    storage = torch.full((blocks * paged.layout.block_bytes,), 0xFF, dtype=torch.uint8)
    host = HostPool(storage.view(blocks, -1), slots)
    small = Runner(paged.model, paged.layout, paged.layout.view(storage, blocks), host)
    params = replace(GREEDY, max_tokens=40)
    requests = [Request(number, tuple(prompt), params, ()) for number, prompt in enumerate(prompts)]
    tight = Scheduler(BlockPool(blocks), BLOCK, 40, 5, swap=SwapSpace(slots))
    made = token_ids(answered(small, tight, requests))
    assert made == token_ids(answered(paged.runner, Scheduler(BlockPool(200), BLOCK, 40, 5), requests))
    assert tight.counters.preemptions > 0


def test_block_is_long_enough_for_its_state(checkpoint: Path) -> None:
    config = read_model_config(checkpoint)
    for dtype in (torch.float32, torch.int8):
        layout = kv_layout(config, dtype, None)
        shorter = replace(layout, block_tokens=layout.block_tokens - BLOCK_TOKENS)
        assert layout.block_tokens % BLOCK_TOKENS == 0
        assert layout.state_bytes * 2 <= layout.block_bytes
        assert shorter.block_tokens == 0 or shorter.state_bytes * 2 > shorter.block_bytes
    assert kv_layout(config, torch.float32, 8).block_tokens == 8


def test_layers_that_draft_are_left_out(checkpoint: Path, paged: PagedModel, tmp_path: Path) -> None:
    folder = tmp_path / "drafting"
    shutil.copytree(checkpoint, folder)
    weights = folder / "model.safetensors"
    save_file({**load_file(weights), "mtp.fc.weight": torch.zeros(2, 2)}, weights)
    assert PagedModel(folder, BLOCK).model.config == paged.model.config


def test_block_of_a_published_model_follows_from_its_configuration(tmp_path: Path) -> None:
    Qwen3NextConfig(max_position_embeddings=262144).save_pretrained(tmp_path)  # the sizes of Qwen3-Next-80B-A3B
    config = read_model_config(tmp_path)
    assert (config.kv_layers, config.state_numbers) == (12, 36 * (32 * 128 * 128 + 4 * 8192))
    layout = kv_layout(config, torch.bfloat16, None)
    assert (layout.token_bytes, layout.block_tokens) == (24576, 3296)


def test_request_needing_an_earlier_state_is_rejected(checkpoint: Path) -> None:
    options = ModelOptions(checkpoint, CPU, "float32", None, 1 << 26, None)
    with pytest.raises(
        ModelError, match=r"has a recurrent state that cannot be rolled back.*disable speculative decoding"
    ):
        prepare_model(replace(options, speculates=True))


def test_state_that_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    odd = make_checkpoint(tmp_path / "odd", "qwen3_5_text", linear_num_key_heads=1)
    with pytest.raises(ModelError, match="tensor-parallel is 2, but linear_num_key_heads of this model is 1"):
        check_parallel(odd, "none", 2)
    mamba = make_checkpoint(tmp_path / "mamba", "granitemoehybrid")
    with pytest.raises(ModelError, match="tensor-parallel is 2, but Mamba layers run on one rank only"):
        check_parallel(mamba, "none", 2)
    config = read_model_config(make_checkpoint(tmp_path / "even", "qwen3_5_text"))
    layout = kv_layout(config, torch.float32, 8)
    assert shard_layout(layout, 2) == kv_layout(shard_config(config, 2), torch.float32, 8)
    assert shard_layout(layout, 2).block_bytes * 2 == layout.block_bytes
    with pytest.raises(
        ModelError, match=r"tensor-parallel is 3, but a state of \d+ bytes cannot be split into 3 parts"
    ):
        shard_layout(layout, 3)


def test_ranks_and_one_process_do_not_exchange_parts_of_states(divisible: Path) -> None:
    options = ModelOptions(divisible, CPU, "float32", None, 1 << 26, None)
    alone, together = (prepare_model(replace(options, tensor_parallel=ranks)) for ranks in (1, 2))
    assert alone.fingerprint != together.fingerprint
    assert "ranks=2" in together.kv_description
