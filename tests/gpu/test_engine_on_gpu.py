"""The engine on a GPU: tokens of transformers, the same with graphs and without, ahead of itself and step by step."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.layout import kv_layout
from baton.engine.kv_cache.swap_space import SwapSpace
from baton.engine.load import load_model
from baton.engine.offline.llm import LLM
from baton.engine.offline.params import SamplingParams as OfflineParams
from baton.engine.request import BlockSwap, Chunk, Computed, Plan, Request, Sample
from baton.engine.runner.cuda_graphs import GraphSizes, why_not_recorded
from baton.engine.runner.engine import Engine
from baton.engine.runner.prefill_attention import PrefillAttention
from baton.engine.runner.runner import HostPool, Runner
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import RequestFailed, TokenMade
from baton.lab.benchmarks.gpu.drawn import SHAPES, drawn_model
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import PagedModel, random_prompt, unlikely
from tests.gpu.device import ATTENTION_ROUNDING, CUDA, apart, needs_gpu

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
    quantize: str = "none",
) -> Answers:
    """Of all prompts, greedily and drawn, side by side, over a pool of NaN."""
    model = load_model(checkpoint, dtype, CUDA, progress=False, quantize=quantize)
    assert why_not_recorded(model) is None
    layout = kv_layout(model.config, dtype, BLOCK)
    storage = torch.full((blocks * layout.block_bytes,), 0xFF if poison else 0, dtype=torch.uint8, device=CUDA)
    sizes = GraphSizes(16, math.ceil(400 / BLOCK)) if graphs else None
    runner = Runner(model, layout, layout.view(storage, blocks), graphs=sizes)
    runner.warm_up()
    scheduler = Scheduler(BlockPool(blocks), BLOCK, 64, max_sequences=16, swap=SwapSpace(0))
    runner.may_launch_ahead = overlapped
    engine = Engine(runner, scheduler)
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


def test_greedy_answers_equal_transformers(checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ours = answers(checkpoint)
    for number, prompt in enumerate(PROMPTS):
        assert unlikely(theirs, prompt, ours[2 * number, 0]) == []


def test_graphs_and_steps_ahead_change_no_token(checkpoint: Path) -> None:
    expected = answers(checkpoint, graphs=False, overlapped=False)
    for graphs, overlapped in ((True, False), (False, True), (True, True)):
        found = answers(checkpoint, graphs=graphs, overlapped=overlapped)
        # Graphs take other splits and shapes of products, which add up in another order: a near tie may fall otherwise.
        assert sum(found[key] != expected[key] for key in expected) <= 1


def test_preemption_changes_no_token(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama")
    assert answers(checkpoint, blocks=60) == answers(checkpoint)


@pytest.mark.parametrize("quantize", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_quantised_weights_answer_like_expanded_ones(family: str, quantize: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, family)
    spelled = PagedModel(checkpoint, BLOCK, 200, quantize=quantize)  # on the CPU
    expected = spelled.greedy(PROMPTS, GREEDY.max_tokens, chunk_tokens=512)
    ours = answers(checkpoint, quantize=quantize)
    same = sum(ours[2 * number, 0] == tokens for number, tokens in enumerate(expected))
    assert same >= len(PROMPTS) - 1  # sums are in another order


def test_plan_of_copies_alone_returns_after_them(tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, "llama"), torch.float32, CUDA, progress=False)
    layout, blocks = kv_layout(model.config, torch.float32, BLOCK), 3000
    storage = torch.randint(0, 256, (blocks * layout.block_bytes,), dtype=torch.uint8, device=CUDA)
    before, rows = storage.cpu().view(blocks, -1), storage.view(blocks, -1)
    runner = Runner(model, layout, layout.view(storage, blocks), HostPool(rows, blocks))
    runner.run(Plan((), swaps_out=tuple(BlockSwap(block, block) for block in range(blocks))))
    with torch.cuda.stream(torch.cuda.Stream()):  # as a pull would: it waits for nothing of ours
        storage.zero_()
        torch.cuda.current_stream().synchronize()
    runner.run(Plan((), swaps_in=tuple(BlockSwap(block, block) for block in range(blocks))))
    with torch.cuda.stream(torch.cuda.Stream()):
        assert rows.cpu().equal(before)


def test_step_in_bfloat16_is_finite_throughout(tmp_path: Path) -> None:
    made = answers(make_checkpoint(tmp_path, "qwen3"), dtype=torch.bfloat16)
    assert all(len(tokens) == GREEDY.max_tokens for tokens in made.values())


def test_prompt_leaves_the_same_kv_whichever_attention_computes_it(tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, "llama"), torch.bfloat16, CUDA, progress=False)
    layout, prompt, pools = kv_layout(model.config, torch.bfloat16, BLOCK), PROMPTS[-1], []
    for attention in (PrefillAttention.TRITON, PrefillAttention.SDPA):
        storage = torch.zeros(BLOCKS * layout.block_bytes, dtype=torch.uint8, device=CUDA)
        runner = Runner(model, layout, layout.view(storage, BLOCKS), prefill_attention=attention)
        runner.warm_up()
        table = list(range(1, 1 + math.ceil(len(prompt) / BLOCK)))
        runner.run(Plan((Chunk(0, prompt, 0, table),)))
        pools.append(layout.view(storage, BLOCKS).data[table])
    assert apart(*pools) < ATTENTION_ROUNDING
    assert not torch.equal(pools[0], pools[1])  # they add up in another order


@pytest.mark.parametrize("shape", SHAPES)
def test_models_of_real_shapes_are_recorded_and_stay_finite(shape: str, tmp_path: Path) -> None:
    """Also compiles, beside other tests, what the rows of lab/benchmarks/gpu.sh begin with."""
    model, blocks = drawn_model(tmp_path, shape, CUDA, dry=False, num_hidden_layers=2), 64
    layout = kv_layout(model.config, torch.bfloat16, 32)
    storage = torch.zeros(blocks * layout.block_bytes, dtype=torch.uint8, device=CUDA)
    runner = Runner(model, layout, layout.view(storage, blocks), graphs=GraphSizes(64, 16))
    runner.warm_up()
    table, samples = list(range(1, 33)), (Sample(0, SAMPLED),)
    [prompt] = runner.run(Plan((Chunk(0, random_prompt(1000), 0, table, samples),)))
    [answer] = runner.run(Plan((Chunk(0, [5], 1000, table, samples),)))
    assert isinstance(prompt, Computed)
    assert isinstance(answer, Computed)


def test_offline_engine_answers_equally_on_both_devices(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "qwen3")
    params, found = OfflineParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=3), []
    for device in ("cpu", "cuda"):
        llm = LLM(str(checkpoint), dtype="float32", device=device, kv_memory=1 << 26, max_num_seqs=8, quiet=True)
        found.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)])
    assert found[0] == found[1]
