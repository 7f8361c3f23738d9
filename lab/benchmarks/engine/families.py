"""How fast is each family of Baton's own decoder beside a Llama of the same shape?

    .venv/bin/python -m baton.lab.benchmarks.engine.families [--family gemma2 ...] [--json FILE]

A random checkpoint of each family, with its own features at the sizes of one Llama, so that all multiply equally many
numbers: what a ratio is above 1, the features cost. Prompts and decode steps of the two take turns in one process;
figures are medians. The row of llama is the Llama beside itself, the noise of the others. PyTorch's operations in one
decode step say what is left outside the native kernels; they are the same on every machine.
"""

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from baton.engine.config.families import FAMILIES
from baton.lab.benchmarks.engine.speed import EngineRun, EngineSetup, LoadedEngine, load_engine, random_prompts
from baton.lab.benchmarks.report.result import Columns, read_arguments, table, write_result

REFERENCE = "llama"
BATCHES = (1, 8)
LAYERS = 6
SHAPE: Mapping[str, Any] = {  # of SmolLM2-135M, with fewer layers
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}
WINDOW = 256
BY_LAYER = ["sliding_attention", "sliding_attention", "full_attention"] * (LAYERS // 3)
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
YARN = {**DEFAULT_ROPE, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024}
TWO_EXPERTS = {"num_experts_per_tok": 2, "intermediate_size": 768}  # a token's arithmetic is that of the Llama
AND_SHARED = {  # one expert and what every token takes: likewise
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 768,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
LATENT = {  # rows and what stands for a value are multiples of 32 numbers, as those of the published models
    "num_key_value_heads": 9,
    "kv_lora_rank": 96,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    **AND_SHARED,
}
DELTA = {
    "linear_num_key_heads": 9,
    "linear_num_value_heads": 9,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
DELTA_EXPERTS = {
    **DELTA,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 768,
    "shared_expert_intermediate_size": 768,
}
FEATURES: Mapping[str, Mapping[str, Any]] = {  # where a family's own defaults lack them, or are of other sizes
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"num_local_experts": 4, **TWO_EXPERTS},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 768, "num_experts_per_tok": 2},
    "gemma2": {"query_pre_attn_scalar": 64, "sliding_window": WINDOW},
    "gemma3_text": {
        "query_pre_attn_scalar": 64,
        "sliding_window": WINDOW,
        "layer_types": BY_LAYER,
        "rope_parameters": {"sliding_attention": DEFAULT_ROPE, "full_attention": {**DEFAULT_ROPE, "rope_theta": 1e6}},
    },
    "phi3": {"partial_rotary_factor": 0.75, "sliding_window": WINDOW},
    "olmo3": {
        "sliding_window": WINDOW,
        "layer_types": BY_LAYER,
        "rope_parameters": {"sliding_attention": DEFAULT_ROPE, "full_attention": YARN},
    },
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625,
        "logits_scaling": 8.0,
    },
    "smollm3": {"no_rope_layer_interval": 3},
    "exaone4": {"sliding_window": WINDOW, "layer_types": BY_LAYER},
    "seed_oss": {"attention_bias": True, "attention_out_bias": True},
    "gpt_oss": {"num_local_experts": 4, **TWO_EXPERTS, "sliding_window": WINDOW},
    "qwen3_next": DELTA_EXPERTS,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA_EXPERTS,
    "deepseek_v2": LATENT,
    "deepseek_v3": {**LATENT, "q_lora_rank": 192},
    "glm4_moe": {**AND_SHARED, "attention_bias": True, "use_qk_norm": True},
}


@dataclass(frozen=True, slots=True)
class Work:
    prompt_tokens: int
    context_tokens: int  # of each sequence before its decode steps
    new_tokens: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Times:
    """Medians of one round."""

    prefill_ms: float
    decode_ms: tuple[float, ...]  # of BATCHES


@dataclass(frozen=True, slots=True)
class FamilySpeed:
    """Medians of all rounds; the Llama's ran in turn with the family's."""

    family: str
    operations: int  # of PyTorch in a decode step of one sequence
    prefill_ms: float
    decode_ms: tuple[float, ...]  # of BATCHES
    llama_prefill_ms: float
    llama_decode_ms: tuple[float, ...]

    def prefill_ratio(self) -> float:
        return self.prefill_ms / self.llama_prefill_ms

    def decode_ratios(self) -> list[float]:
        return [own / llama for own, llama in zip(self.decode_ms, self.llama_decode_ms, strict=True)]


COLUMNS: Columns[FamilySpeed] = {
    "family": lambda speed: speed.family,
    "operations": lambda speed: speed.operations,
    "prefill ms": lambda speed: f"{speed.prefill_ms:.1f}",
    "decode ms": lambda speed: " / ".join(f"{each:.2f}" for each in speed.decode_ms),
    "prefill / llama": lambda speed: f"{speed.prefill_ratio():.2f}",
    "decode / llama": lambda speed: " / ".join(f"{ratio:.2f}" for ratio in speed.decode_ratios()),
}


class Operations(TorchDispatchMode):
    """Counts those of PyTorch while it is entered; views and native kernels are none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def main() -> None:
    asked = read_arguments(
        __doc__,
        family=([], "families; all of them where there is none"),
        prompt_tokens=512,
        context_tokens=64,
        new_tokens=16,
        rounds=3,
        dtype=("auto", "type that the models compute in"),
    )
    work = Work(asked.prompt_tokens, asked.context_tokens, asked.new_tokens, asked.rounds)
    speeds = list(compare(asked.family or list(FAMILIES), work, asked.dtype))
    print(table(speeds, COLUMNS))
    print(f"prompt of {work.prompt_tokens} tokens; decode steps of {' / '.join(map(str, BATCHES))} sequences")
    write_result(asked.json, {"shape": dict(SHAPE), "work": asdict(work), "families": list(map(asdict, speeds))})


def compare(families: Sequence[str], work: Work, dtype: str) -> Iterator[FamilySpeed]:
    """Raises: CommandFailed."""
    with loaded(REFERENCE, work, dtype) as llama:
        for family in families:
            with loaded(family, work, dtype) as own:
                yield beside(family, own, llama, work)


@contextmanager
def loaded(family: str, work: Work, dtype: str) -> Iterator[LoadedEngine]:
    """A random checkpoint of the family, which is on disk until it is loaded. Raises: CommandFailed."""
    tokens = max(work.prompt_tokens, work.context_tokens) + work.new_tokens
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as scratch:
        folder = make_checkpoint(Path(scratch), family)
        engine = load_engine(EngineSetup(folder, dtype, "none", "auto", max(BATCHES), tokens))
    yield engine


def family_config(family: str) -> Any:
    return AutoConfig.for_model(family, **{**SHAPE, **FEATURES.get(family, {})})


def make_checkpoint(folder: Path, family: str) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(family_config(family), dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def beside(family: str, own: LoadedEngine, llama: LoadedEngine, work: Work) -> FamilySpeed:
    measure(own, work, seed=0), measure(llama, work, seed=0)  # not counted: first steps allocate, and choose
    rounds = [(measure(own, work, seed), measure(llama, work, seed)) for seed in range(1, 1 + work.rounds)]
    mine, theirs = (_median(times) for times in zip(*rounds, strict=True))
    return FamilySpeed(
        family,
        operations(own, work),
        mine.prefill_ms,
        mine.decode_ms,
        theirs.prefill_ms,
        theirs.decode_ms,
    )


def measure(engine: LoadedEngine, work: Work, seed: int) -> Times:
    """One round. Raises: CommandFailed."""
    vocab_size = engine.prepared.config.vocab_size
    prompts = random_prompts(vocab_size, 1, work.prompt_tokens, seed)
    prefill_s = EngineRun(engine, 1).prefill_s(prompts)
    decode_ms = []
    for batch in BATCHES:
        steps = EngineRun(engine, batch).decode_steps_s(
            random_prompts(vocab_size, batch, work.context_tokens, seed), work.new_tokens
        )
        decode_ms.append(statistics.median(steps) * 1e3)
    return Times(prefill_s * 1e3, tuple(decode_ms))


def operations(engine: LoadedEngine, work: Work) -> int:
    """Of PyTorch in a decode step of one sequence: what a second step adds to an answer's steps."""
    counts: list[int] = []
    prompt = random_prompts(engine.prepared.config.vocab_size, 1, work.context_tokens, seed=0)
    for new_tokens in (work.new_tokens, 2 * work.new_tokens):
        with Operations() as counted:
            EngineRun(engine, 1).decode_steps_s(prompt, new_tokens)
        counts.append(counted.count)
    return round((counts[1] - counts[0]) / work.new_tokens)


def _median(rounds: Sequence[Times]) -> Times:
    decode = zip(*(times.decode_ms for times in rounds), strict=True)
    prefill_ms = statistics.median(times.prefill_ms for times in rounds)
    return Times(prefill_ms, tuple(statistics.median(each) for each in decode))


if __name__ == "__main__":
    main()
