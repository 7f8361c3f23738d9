"""No kernel is compiled while requests run: warm-up has met every variant that later steps start.

Steps of a real engine run up to their launches, which Triton itself makes, on a GPU that is not there: it specialises
them and looks up what it has compiled. Where it would compile, the variant is taken down. Nothing is computed.
"""

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from baton.engine.request import BlockCopy, Chunk, Plan, Sample
from baton.engine.runner.cuda_graphs import GraphSizes, why_not_recorded
from baton.engine.runner.runner import Runner, warm_up_plans
from baton.engine.sampling.params import SamplingParams
from baton.kernels.dispatch import on_the_interpreter
from baton.kernels.triton import launch
from baton.lab.benchmarks.triton.absent_gpu import absent_gpu
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.host_recorder import HostRecorder
from tests.fixtures.paged import PagedModel

BLOCK, LONGEST = 32, 1024
GREEDY = Sample(0, SamplingParams(max_tokens=1))
DRAWN = Sample(0, SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9))

Variants = dict[str, set[str]]


DEVICES = itertools.count()  # a new one has nothing compiled


class Compiled:
    """In the place of a compiled kernel."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        pass

    def run(self, *_: object) -> None:
        pass


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Variants]:
    """Keys of variants by the name of the kernel, of all that Triton would compile from now on; products of PyTorch do
    not run either."""
    keys: Variants = defaultdict(set)

    def take_down(kernel: Any, key: str, signature: object, device: int, *_: object) -> Compiled:
        assert kernel.cache_key, "Triton finds what globals the kernel reads, and compares them at every launch"
        keys[kernel.__name__].add(key)
        return kernel.device_caches[device][0].setdefault(key, Compiled())

    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, weight, *_: x.new_zeros(*x.shape[:-1], len(weight)))
    monkeypatch.setattr(JITFunction, "_do_compile", take_down)
    monkeypatch.setattr(launch, "INTERPRETED", launch.Device(90, 132, overlaps=True))
    with absent_gpu(90, number=next(DEVICES)):
        yield keys


def table(tokens: int) -> list[int]:
    return [0] * -(-tokens // BLOCK)


def answers(dice: random.Random, count: int) -> list[Chunk]:
    starts = [dice.randrange(LONGEST - 1) for _ in range(count)]
    return [
        Chunk(number, [0], start, table(start + 1), (dice.choice((GREEDY, DRAWN)),))
        for number, start in enumerate(starts)
    ]


def prompt(dice: random.Random, number: int, tokens: int) -> Chunk:
    start = dice.randrange(LONGEST - tokens)
    return Chunk(number, [0] * tokens, start, table(start + tokens), (GREEDY,) if dice.random() < 0.5 else ())


def later_steps(dice: random.Random) -> Iterator[Plan]:
    """Of every number of answers and many lengths of prompts, alone and together, with copies of blocks."""
    for count in range(1, 70):
        yield Plan(tuple(answers(dice, count)), copies=tuple(BlockCopy(0, 0) for _ in range(count % 4)))
    for tokens in (*range(2, 140), *range(140, LONGEST, 61)):
        yield Plan((prompt(dice, 0, tokens),))
    for _ in range(100):
        prompts = [prompt(dice, 90 + number, dice.randrange(2, 150)) for number in range(dice.randrange(1, 4))]
        yield Plan((*answers(dice, dice.randrange(1, 6)), *prompts))


def run(runner: Runner, plans: Iterator[Plan]) -> None:
    for plan in plans:
        runner.launch(plan)


@pytest.mark.parametrize(
    ("family", "options", "shape"),
    [
        ("llama", {}, {}),
        ("qwen3", {"kv_dtype": torch.float8_e4m3fn}, {}),
        ("llama", {"quantize": "int8"}, {}),
        ("llama", {"quantize": "int4"}, {"hidden_size": 128, "intermediate_size": 256}),
        ("llama", {"quantize": "fp8"}, {"num_attention_heads": 8, "num_key_value_heads": 1}),
        ("llama", {}, {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 224, "head_dim": 16}),
        ("mixtral", {}, {}),
        ("qwen3_moe", {}, {"num_experts": 16, "num_experts_per_tok": 2}),
        ("qwen3_5_text", {}, {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}),
    ],
)
def test_no_variant_is_new_after_warm_up(
    family: str, options: dict[str, Any], shape: dict[str, Any], compiled: Variants, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, family, **{"num_hidden_layers": 1, "max_position_embeddings": LONGEST, **shape})
    with on_the_interpreter():
        paged = PagedModel(folder, BLOCK, 8, torch.bfloat16, **options)
        runner = paged.runner
        runner.may_launch_ahead = True  # tokens are drawn on the device, as on a GPU
        run(runner, warm_up_plans(BLOCK, LONGEST, compiles=True))
        if why_not_recorded(paged.model) is None:
            runner.record(GraphSizes(16, LONGEST // BLOCK), HostRecorder())
        warm = {kernel: set(keys) for kernel, keys in compiled.items()}
        run(runner, later_steps(random.Random(0)))
    new = {kernel: keys - warm.get(kernel, set()) for kernel, keys in compiled.items()}
    assert {"attend_part", "attend_chunk", "survey_part", "draw_row", "copy_row"} <= set(compiled)
    assert all(len(compiled[kernel]) == 1 for kernel in ("convolve", "apply_rule") if kernel in compiled)
    assert not any(new.values()), "\n".join(f"{kernel}: {key}" for kernel, keys in new.items() for key in keys)
