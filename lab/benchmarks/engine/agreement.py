"""How often bf16 answers are those of transformers in bf16, token for token. Greedy, one prompt at a time in both.

    python -m baton.lab.benchmarks.engine.agreement [--model FOLDER] [--prompts 32] [--tokens 64] [--json FILE]

bf16 rounds differently in every kernel, so two right engines part wherever the two likeliest tokens are nearly alike,
and go different ways from there. Reported are the share of tokens before the first difference, and what transformers in
float32 would have chosen at that difference: if Baton's errors were larger than bf16's own, it would side with
transformers in bf16 clearly more often.

The demo model is asked about tables, any other model is given random tokens: a model with random weights parts far
sooner than one that is sure of its answers.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from baton.engine.offline.llm import LLM
from baton.engine.offline.params import SamplingParams
from baton.lab.benchmarks.engine.quality import make_questions
from baton.lab.benchmarks.report.result import DEMO, read_arguments, write_result

PROMPT_TOKENS = 128  # of random ones
KV_MEMORY_BYTES = 256 << 20


@dataclass(frozen=True)
class Agreement:
    prompts: int
    equal_share: float  # of all tokens, those before the first difference of their answer
    equal_answers: int
    float32_sides_with_baton: int  # at first differences
    float32_sides_with_transformers: int


def main() -> None:
    arguments = read_arguments(__doc__, model=DEMO, prompts=32, tokens=64)
    found = measure(arguments.model, arguments.prompts, arguments.tokens)
    print("\n".join(f"{name}: {value}" for name, value in asdict(found).items()))
    write_result(arguments.json, {"model": arguments.model.name, "tokens": arguments.tokens, **asdict(found)})


def measure(model: Path, prompts: int, tokens: int) -> Agreement:
    llm = LLM(str(model), dtype="bfloat16", kv_memory=KV_MEMORY_BYTES, quiet=True)
    asked = make_prompts(model, llm, prompts)
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    ours = [list(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids) for prompt in asked]
    del llm
    theirs = generate(load(model, torch.bfloat16), asked, tokens)
    exact = load(model, torch.float32)
    alike = [common_prefix(mine, other) for mine, other in zip(ours, theirs, strict=True)]
    parted = [index for index, mine in enumerate(ours) if alike[index] < min(len(mine), len(theirs[index]))]
    chosen = {index: choice(exact, [*asked[index], *ours[index][: alike[index]]]) for index in parted}
    longest = [max(len(mine), len(other)) for mine, other in zip(ours, theirs, strict=True)]
    return Agreement(
        prompts=len(asked),
        equal_share=round(sum(alike) / sum(longest), 4),
        equal_answers=sum(mine == other for mine, other in zip(ours, theirs, strict=True)),
        float32_sides_with_baton=sum(chosen[index] == ours[index][alike[index]] for index in parted),
        float32_sides_with_transformers=sum(chosen[index] == theirs[index][alike[index]] for index in parted),
    )


def make_prompts(model: Path, llm: LLM, count: int) -> list[list[int]]:
    tokenizer: Any = llm.get_tokenizer()
    if model.resolve() == DEMO:
        texts = [
            tokenizer.apply_chat_template(question.messages, add_generation_prompt=True, tokenize=False)
            for question in make_questions(count)
        ]
        return [list(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
    draw = random.Random(1)
    return [draw.choices(range(10, len(tokenizer)), k=PROMPT_TOKENS) for _ in range(count)]


def load(model: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()


@torch.inference_mode()
def generate(model: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        answers.append(made[0, len(prompt) :].tolist())
    return answers


@torch.inference_mode()
def choice(model: Any, token_ids: Sequence[int]) -> int:
    return int(model(torch.tensor([list(token_ids)])).logits[0, -1].argmax())


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


if __name__ == "__main__":
    main()
