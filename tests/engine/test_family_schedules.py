"""Every family of the decoder through the scheduler, and on two ranks: token for token what transformers answers.

Prompts are longer than every window. Chunks are short, prefixes are found, and the pool is too small for all at once.
"""

import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.layout import kv_layout
from baton.engine.load import load_part
from baton.engine.models.batch import make_batch
from baton.engine.models.decoder import DecoderModel
from baton.engine.parallel.collectives import Collectives
from baton.engine.parallel.model import ParallelModel
from baton.engine.parallel.shard import Shard
from baton.engine.request import Chunk, Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from baton.text.block_hash import HashChain, root_hash
from tests.fixtures.checkpoints import DECODERS, make_checkpoint
from tests.fixtures.paged import CPU, PagedModel, answered, random_prompt, token_ids, unlikely

BLOCK, BLOCKS, LONGEST = 8, 46, 26  # blocks of the pool, and of the longest answer
MORE = 4  # columns that a pool has in addition to the longest answer, if windows release blocks
STEP_TOKENS, NEW_TOKENS = 30, 24
ROOT = root_hash(b"model", "float32")
LENGTHS = (180, 75, 120, 90, 33, 160)
LATENT = ("deepseek_v2", "deepseek_v3")  # with a row of all heads in place of keys and values
UNCUT = ("mistral",)  # with one head of keys and values
MAMBA = ("granitemoehybrid", "bamba", "nemotron_h")  # which run on one rank
LAYER_BY_LAYER = ("gemma3n_text", "gemma4_text")  # neither in one native call nor on several ranks
NOT_NATIVE = ("llama4_text",)  # native kernels scale outputs of experts, not inputs
CHUNKS = (1, 40, 41, 42, 100, 101)


class Made(NamedTuple):
    folder: Path
    expected: Any


@pytest.fixture(scope="module", params=DECODERS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    family = request.param
    heads = {} if family in UNCUT + LATENT else {"num_key_value_heads": 2}
    folder = make_checkpoint(tmp_path_factory.mktemp(family), family, seed=1, **heads)
    return Made(folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def prompts() -> list[list[int]]:
    """Every second one begins as the one before it."""
    first = [random_prompt(length, seed=3) for length in LENGTHS]
    return [each for prompt in first for each in (prompt, prompt[:64] + random_prompt(40, seed=len(prompt)))]


@pytest.mark.usefixtures("native_kernels")
def test_cached_chunked_and_preempted_answers_are_those_of_transformers(made: Made) -> None:
    paged = PagedModel(made.folder, BLOCK, BLOCKS, packed=True)
    groups = paged.layout.groups
    pool = paged.pool(BLOCKS)
    if groups.windowed:
        pool = BlockPool(groups.most_blocks(LONGEST) + groups.blocks(MORE), groups)
    scheduler = Scheduler(pool, BLOCK, STEP_TOKENS, max_sequences=6)
    wanted = prompts()
    params = SamplingParams(max_tokens=NEW_TOKENS)
    requests = [
        Request(number, tuple(prompt), params, tuple(HashChain(ROOT, BLOCK).first(len(prompt) // BLOCK, prompt)))
        for number, prompt in enumerate(wanted)
    ]
    answers = token_ids(answered(paged.runner, scheduler, requests, ROOT))
    for number, prompt in enumerate(wanted):
        assert len(answers[number, 0]) == NEW_TOKENS
        assert unlikely(made.expected, prompt, answers[number, 0]) == []
    assert scheduler.counters.preemptions > 0 or not groups.whole, "windows alone leave room"
    assert scheduler.counters.cache_hit_tokens > 0


def test_all_layers_are_computed_in_one_native_call(made: Made, native_kernels: None) -> None:
    if made.expected.config.model_type in LAYER_BY_LAYER:
        return
    model = PagedModel(made.folder, packed=True).model
    assert isinstance(model, DecoderModel)
    assert (model.native is not None) == (made.expected.config.model_type not in NOT_NATIVE)


def test_two_ranks_together_compute_what_transformers_does(made: Made, tmp_path: Path) -> None:
    if made.expected.config.model_type in UNCUT + MAMBA + LAYER_BY_LAYER:
        return
    prompt = random_prompt(130)
    found: dict[int, torch.Tensor] = {}

    def compute(rank: int) -> None:
        collectives = Collectives(Shard(rank, 2), tmp_path / "meeting", CPU)
        part = load_part(made.folder, torch.float32, CPU, False, "none", collectives)
        model = ParallelModel(part, collectives, lambda rows: None)
        layout = kv_layout(model.config, torch.float32, BLOCK)
        groups, blocks = layout.groups.count, 32 * layout.groups.count
        kv = layout.view(torch.zeros(blocks * layout.block_bytes, dtype=torch.uint8), blocks)
        parts = []
        with torch.inference_mode():
            for start, end in zip((0, *CHUNKS), (*CHUNKS, len(prompt)), strict=True):
                batch = make_batch(
                    [Chunk(0, prompt[start:end], start, list(range(20 * groups)))], BLOCK, CPU, groups=groups
                )
                parts.append(model.logits_together(model.hidden(batch, kv)))
        found[rank] = torch.cat(parts)
        collectives.close()

    ranks = [threading.Thread(target=compute, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    with torch.inference_mode():
        expected = made.expected(torch.tensor([prompt])).logits[0]
    for logits in (found[0], found[1]):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
