"""Rows of the GPU table: comparison with transformers' continuous batching and FlashInfer's attention.

`generate_batch` gets the same weights, prompts and lengths, FlashInfer the same tensors; its wheel compiles its kernels
with nvcc on first use.
"""

import gc
import importlib
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from baton.engine.sampling.params import SamplingParams
from baton.kernels.attention import paged_prefills
from baton.kernels.types import PrefillChunks
from baton.lab.benchmarks.gpu.attention import BLOCK_TOKENS, HEAD_DIM, HEADS, KV_HEADS, SCORING, Contexts, contexts
from baton.lab.benchmarks.gpu.drawn import write_checkpoint
from baton.lab.benchmarks.gpu.engine import DrawnEngine, EngineWork
from baton.lab.benchmarks.gpu.row import AbsentError, Figure, GpuRow, Setting, at_least, seconds

ATTENTION = ("flash_attention_2", "sdpa")  # in order of preference
WORKSPACE_BYTES = 256 << 20
LAYOUT = "HND"  # [block][kv][head][token][dim], Baton's layout


def ours(work: EngineWork, setting: Setting) -> float:
    """Return Baton's output tokens per second, after a warm-up."""
    engine = DrawnEngine("qwen0.6b", work, setting)
    greedy = SamplingParams(max_tokens=1)
    engine.run(EngineWork(work.prompts[:2], [4, 4]), greedy)
    return sum(work.answer_tokens) / engine.run(work, greedy)[-1]


def theirs(folder: Path, work: EngineWork, setting: Setting) -> tuple[float, str]:
    """Return the output tokens per second of `generate_batch`, and its attention. Raises: AbsentError if it fails."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    answer = work.answer_tokens[0]
    plain = GenerationConfig(max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0)
    said = []
    for attention in ATTENTION[-1:] if setting.dry else ATTENTION:
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16, attn_implementation=attention
            )
            model.to(setting.device)
            _generate(model, work.prompts[:2], plain, setting)
            took_s, tokens = _generate(model, work.prompts, plain, setting)
        except (ImportError, AttributeError, RuntimeError, ValueError, TypeError, MemoryError) as error:
            said.append(f"{attention}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            continue
        if tokens != sum(work.answer_tokens):
            said.append(f"{attention}: {tokens} tokens instead of {sum(work.answer_tokens)}")
            continue
        return tokens / took_s, attention
    raise AbsentError("; ".join(said))


def _generate(model: Any, prompts: Sequence[Sequence[int]], plain: Any, setting: Setting) -> tuple[float, int]:
    from transformers import ContinuousBatchingConfig

    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64) if setting.dry else None
    inputs = [list(prompt) for prompt in prompts]
    started = time.perf_counter()
    answers = model.generate_batch(inputs, plain, small)
    took_s = time.perf_counter() - started
    return took_s, sum(len(answer.generated_tokens) for answer in answers.values())


def against_transformers(setting: Setting) -> list[Figure]:
    requests, shortest, longest, answer, vocab = setting.size((128, 100, 1024, 256, 10000), (3, 5, 9, 4, 500))
    chance = random.Random(1)
    prompts = [[chance.randrange(vocab) for _ in range(chance.randint(shortest, longest))] for _ in range(requests)]
    work = EngineWork(prompts, [answer] * requests)
    own = ours(work, setting)
    gc.collect()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder), "qwen0.6b", setting.device, setting.dry)
        other, attention = theirs(checkpoint, work, setting)
    limit = f"generate_batch, {attention}: {other:.0f} tokens/s"
    return [
        Figure(f"{requests} requests", own / other, "x its speed", at_least(2.0), limit),
        Figure("ours", own, "output tokens/s"),
    ]


def library() -> Any:
    try:
        return importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:
        raise AbsentError(f"flashinfer: {error}") from error


def workspace(setting: Setting) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=setting.device)


def decode_ratio(flashinfer: Any, asked: Contexts, setting: Setting) -> float:
    """Return FlashInfer's decode time over Baton's."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(setting), LAYOUT, use_tensor_cores=True)
    indptr, ids = asked.rows.block_starts.int(), asked.rows.block_ids.int()
    last = torch.full_like(asked.rows.context_tokens, BLOCK_TOKENS, dtype=torch.int32)
    wrapper.plan(indptr, ids, last, HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS, q_data_type=torch.bfloat16)
    data = asked.kv.layer(0).data.contiguous()
    torch.testing.assert_close(asked.decode(0), wrapper.run(asked.query, data), atol=2e-2, rtol=2e-2)
    return seconds(lambda: wrapper.run(asked.query, data), setting) / seconds(lambda: asked.decode(0), setting)


def prefill_ratio(flashinfer: Any, asked: Contexts, setting: Setting) -> float:
    kv, ids, tokens = asked.kv.layer(0), asked.rows.block_ids, int(asked.rows.context_tokens[0])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(setting), LAYOUT)
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=setting.device)
    last = torch.tensor([BLOCK_TOKENS], dtype=torch.int32, device=setting.device)
    wrapper.plan(
        starts, asked.rows.block_starts.int(), ids.int(), last, HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS,
        causal=True, q_data_type=torch.bfloat16,
    )  # fmt: skip
    query = torch.randn(tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=setting.device)
    data = kv.data.contiguous()
    prefills, ours = PrefillChunks.one(tokens, 0, ids), torch.empty_like(query)
    paged_prefills(query, kv, prefills, SCORING, ours)
    torch.testing.assert_close(ours, wrapper.run(query, data), atol=2e-2, rtol=2e-2)
    theirs_s = seconds(lambda: wrapper.run(query, data), setting)
    return theirs_s / seconds(lambda: paged_prefills(query, kv, prefills, SCORING, ours), setting)


def against_flashinfer(setting: Setting) -> list[Figure]:
    flashinfer = library()
    decode = decode_ratio(flashinfer, contexts(32, 4096, 1, setting), setting)
    prefill = prefill_ratio(flashinfer, contexts(1, 8192, 1, setting), setting)
    version = f"FlashInfer {flashinfer.__version__}"
    return [
        Figure("decode, 32 x 4096", decode, "of its speed", at_least(0.97), version),
        Figure("prefill, 8192", prefill, "of its speed", at_least(0.65), version),
    ]


ROWS = (GpuRow("transformers", against_transformers), GpuRow("flashinfer", against_flashinfer))
