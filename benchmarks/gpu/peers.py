"""Against `generate_batch` of transformers, its own paged continuous batching: same weights, prompts and lengths."""

import gc
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from baton.benchmarks.gpu.drawn import write_checkpoint
from baton.benchmarks.gpu.engine import DrawnEngine, Work
from baton.benchmarks.gpu.row import AbsentError, Figure, Row, Setting, at_least
from baton.engine.sampling.params import SamplingParams

ATTENTION = ("flash_attention_2", "sdpa")  # the first that it takes


def ours(work: Work, setting: Setting) -> float:
    """Output tokens per second, after a run that warms up."""
    engine = DrawnEngine("qwen0.6b", work, setting)
    greedy = SamplingParams(max_tokens=1)
    engine.run(Work(work.prompts[:2], [4, 4]), greedy)
    return sum(work.answer_tokens) / engine.run(work, greedy)[-1]


def theirs(folder: Path, work: Work, setting: Setting) -> tuple[float, str]:
    """The same of generate_batch, and its attention. Raises: AbsentError where it runs with none."""
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
    work = Work(prompts, [answer] * requests)
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


ROWS = (Row("transformers", against_transformers),)
