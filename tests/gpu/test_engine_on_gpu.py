"""The engine on a GPU: tokens of transformers, the same with graphs and without, ahead of itself and step by step."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.cuda_graphs import GraphSizes
from engine.engine import Engine
from engine.kv_layout import kv_layout
from engine.kv_memory import LargestStep, prepare_with_spare_memory
from engine.mixed_scheduler import MixedScheduler
from engine.mixed_state import RequestFailed, TokenMade
from engine.model_config import ModelError
from engine.offline.llm import LLM
from engine.offline.params import SamplingParams as OfflineParams
from engine.overlapped import OverlappedEngine
from engine.pages import BlockPool
from engine.prepare import ModelOptions
from engine.runner import Runner
from engine.sampling_params import SamplingParams
from engine.sequence import Request
from engine.swap_space import SwapSpace
from engine.weights import load_model
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import random_prompt, unlikely
from tests.gpu.device import CUDA, needs_gpu

pytestmark = needs_gpu
BLOCK, BLOCKS = 16, 160
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "mixtral"]
GREEDY = SamplingParams(max_tokens=40)
SAMPLED = replace(GREEDY, temperature=0.8, top_k=50, top_p=0.95, seed=5)
PROMPTS = [random_prompt(tokens) for tokens in (1, 15, 16, 17, 100, 300)]
Answers = dict[tuple[int, int], list[int]]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gpu"), request.param)


def answers(
    checkpoint: Path,
    dtype: torch.dtype = torch.float32,
    graphs: bool = True,
    overlapped: bool = True,
    blocks: int = BLOCKS,
    poison: bool = True,
) -> Answers:
    """Of all prompts, greedily and drawn, side by side, over a pool of NaN."""
    model = load_model(checkpoint, dtype, CUDA, progress=False)
    layout = kv_layout(model.config, dtype, BLOCK)
    storage = torch.full((blocks * layout.block_bytes,), 0xFF if poison else 0, dtype=torch.uint8, device=CUDA)
    sizes = GraphSizes(16, math.ceil(400 / BLOCK)) if graphs else None
    runner = Runner(model, layout, layout.view(storage, blocks), graphs=sizes)
    runner.warm_up()
    scheduler = MixedScheduler(BlockPool(blocks), BLOCK, 64, max_sequences=16, swap=SwapSpace(0))
    engine = OverlappedEngine(runner, scheduler) if overlapped else Engine(runner, scheduler)
    for number, prompt in enumerate(PROMPTS):
        scheduler.add(Request(2 * number, tuple(prompt), GREEDY, ()))
        scheduler.add(Request(2 * number + 1, tuple(prompt), replace(SAMPLED, n=1 + number % 2), ()))
    made: Answers = {}
    while (outcomes := engine.step()) is not None:
        for outcome in outcomes:
            assert not isinstance(outcome, RequestFailed)
            if isinstance(outcome, TokenMade):
                made.setdefault((outcome.request_id, outcome.choice), []).append(outcome.drawn.token_id)
    assert (scheduler.counters.preemptions > 0) == (blocks < BLOCKS)
    return made


def test_greedy_answers_are_those_of_transformers(checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ours = answers(checkpoint)
    for number, prompt in enumerate(PROMPTS):
        assert unlikely(theirs, prompt, ours[2 * number, 0]) == []


def test_graphs_and_steps_ahead_change_no_token(checkpoint: Path) -> None:
    expected = answers(checkpoint, graphs=False, overlapped=False)
    assert answers(checkpoint, graphs=True, overlapped=False) == expected
    assert answers(checkpoint, graphs=False, overlapped=True) == expected
    assert answers(checkpoint, graphs=True, overlapped=True) == expected


def test_preemption_changes_no_token(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama")
    assert answers(checkpoint, blocks=60) == answers(checkpoint)


def test_a_step_in_bfloat16_is_finite_throughout(tmp_path: Path) -> None:
    made = answers(make_checkpoint(tmp_path, "qwen3"), dtype=torch.bfloat16)
    assert all(len(tokens) == GREEDY.max_tokens for tokens in made.values())


def test_the_pool_is_what_weights_and_the_largest_step_leave(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama")
    asked = ModelOptions(checkpoint, CUDA, "bfloat16", 32, 0, None)
    free_before, total = torch.cuda.mem_get_info(CUDA)
    share = 0.5 * free_before / total
    prepared = prepare_with_spare_memory(asked, LargestStep(2048, 64), share)
    assert 0.5 * share * total < prepared.pool_bytes < share * total
    storage = torch.zeros(prepared.pool_bytes, dtype=torch.uint8, device=CUDA)
    prepared.load(storage, progress=False, decode_rows=64).warm_up()
    assert free_before - torch.cuda.mem_get_info(CUDA)[0] < share * total
    with pytest.raises(ModelError, match="leaves no room"):
        prepare_with_spare_memory(asked, LargestStep(2048, 64), 1e-4)


def test_the_offline_engine_answers_alike_on_both_devices(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "qwen3")
    params, found = OfflineParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=3), []
    for device in ("cpu", "cuda"):
        llm = LLM(str(checkpoint), dtype="float32", device=device, kv_memory=1 << 26, max_num_seqs=8, quiet=True)
        found.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)])
    assert found[0] == found[1]
