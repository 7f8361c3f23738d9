"""Train the demo model: a small Llama that answers questions about a table in its prompt.

    python models/tableqa/train.py OUT [--minutes 60] [--seed 0] [--resume CHECKPOINT]

Needs only what Baton itself needs. See README.md beside this file for how the shipped weights were made.
"""

import argparse
import math
import random
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from train_data import FACTS, FIRST, JOBS, LANDS, LAST, Part, dialogue
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT_TOKENS = 4096
# Above this moving average of the accuracy the next stage begins.
STAGE_PASSED = 0.95
SAVE_EVERY_STEPS = 400
SAY_EVERY_STEPS = 100


class Stage(NamedTuple):
    rows: int
    questions: int
    length_tokens: int
    batch: int


STAGES = (Stage(3, 5, 288, 32), Stage(8, 7, 416, 20), Stage(16, 8, 576, 14), Stage(32, 10, 920, 9))


class Batch(NamedTuple):
    tokens: torch.Tensor  # [batch, length]
    weights: torch.Tensor  # [batch, length], of each token in the loss


@dataclass
class Progress:
    step: int = 0
    stage: int = 0
    # Moving average of the accuracy on what only the table can tell.
    accuracy: float = 0.0
    # Whether the model has learned to copy: induction heads exist.
    copies: bool = False


def make_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = ["".join(part.text for part in dialogue(rng, rng.randint(4, 30), 8)) for _ in range(1500)]
    texts += [f"{question} {answer}" for question, answer in FACTS] * 40
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=CONTEXT_TOKENS,
            rope_theta=10000.0,
            tie_word_embeddings=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )


class Batches:
    """Draws training data; owns the random numbers of the data."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        words = [*FIRST, *LAST, *JOBS, *LANDS, *map(str, range(18, 90))]
        self._words = torch.tensor([tokenizer(f" {word}", add_special_tokens=False).input_ids[0] for word in words])

    def copying(self, batch: int = 64, length: int = 96) -> Batch:
        """Random spans repeated: the plainest way to grow induction heads, without which no table is read."""
        span = self._rng.randint(8, 40)
        drawn = self._words[torch.randint(0, len(self._words), (batch, span))]
        tokens = drawn.repeat(1, length // span + 1)[:, :length]
        weights = torch.ones(tokens.shape)
        weights[:, : span + 1] = 0.0
        return Batch(tokens, weights)

    def tables(self, stage: Stage) -> Batch:
        rows = [
            self._encode(
                dialogue(self._rng, self._rng.randint(max(2, stage.rows // 3), stage.rows), stage.questions),
                stage.length_tokens,
            )
            for _ in range(stage.batch)
        ]
        tokens, weights = zip(*rows, strict=True)
        return Batch(torch.tensor(tokens), torch.tensor(weights))

    def _encode(self, parts: list[Part], length: int) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        weights: list[float] = []
        for part in parts:
            encoded = self._tokenizer(part.text, add_special_tokens=False).input_ids
            tokens += encoded
            weights += [part.weight] * len(encoded)
        padding = max(0, length - len(tokens))
        return (
            tokens[:length] + [self._tokenizer.pad_token_id] * padding,
            weights[:length] + [0.0] * padding,
        )


def train_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: Batch) -> tuple[float, float]:
    """The loss, and the accuracy on the tokens that weigh most."""
    hidden = model.model(batch.tokens).last_hidden_state[:, :-1]
    targets, weights = batch.tokens[:, 1:], batch.weights[:, 1:]
    chosen = weights > 0
    targets, weights = targets[chosen], weights[chosen]
    # Logits only where there is a loss: the vocabulary is the widest part of this model.
    logits = model.lm_head(hidden[chosen])
    losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    decisive = weights > 0.5
    accuracy = (logits.argmax(-1) == targets)[decisive].float().mean().item() if decisive.any() else 0.0
    return loss.item(), accuracy


def advance(progress: Progress, elapsed_share: float) -> None:
    last = len(STAGES) - 1
    if progress.accuracy > STAGE_PASSED and progress.stage < last:
        progress.stage += 1
        progress.accuracy = 0.0
        print(f"-- stage {progress.stage}", flush=True)
    if progress.stage < last and elapsed_share > 0.75:
        progress.stage = last
        print("-- out of time: the last stage", flush=True)


def learning_rate(peak: float, step: int, elapsed_share: float) -> float:
    """Linear warm-up, then half a cosine over the time given."""
    warm_up = min(1.0, (step + 1) / 50)
    return peak * warm_up * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, elapsed_share))))


def train(out: str, minutes: float, seed: int, resume: str | None) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(resume) if resume else make_tokenizer(rng)
    model = LlamaForCausalLM.from_pretrained(resume, dtype=torch.float32) if resume else make_model(tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters, vocabulary {len(tokenizer)}", flush=True)
    batches = Batches(tokenizer, rng)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    # A checkpoint to resume goes straight to the last stage, with a lower rate.
    progress = Progress(stage=len(STAGES) - 1 if resume else 0, copies=bool(resume))
    peak = 6e-4 if resume else 1e-3
    start = time.monotonic()
    while (share := (time.monotonic() - start) / 60 / minutes) < 1:
        advance(progress, share)
        copying = not progress.copies or rng.random() < 0.1
        batch = batches.copying() if copying else batches.tables(STAGES[progress.stage])
        optimizer.param_groups[0]["lr"] = learning_rate(peak, progress.step, share)
        loss, accuracy = train_step(model, optimizer, batch)
        if copying:
            progress.copies = progress.copies or accuracy > 0.9
        else:
            progress.accuracy = 0.97 * progress.accuracy + 0.03 * accuracy
        if progress.step % SAY_EVERY_STEPS == 0:
            kind = "copy" if copying else "table"
            print(
                f"{share * minutes:.1f} min, {progress}, {kind}: loss {loss:.3f}, accuracy {accuracy:.3f}", flush=True
            )
        progress.step += 1
        if progress.step % SAVE_EVERY_STEPS == 0:
            model.save_pretrained(out)
            tokenizer.save_pretrained(out)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"saved {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", help="a checkpoint of this script: skip to the last stage, with a lower rate")
    arguments = parser.parse_args()
    train(arguments.out, arguments.minutes, arguments.seed, arguments.resume)


if __name__ == "__main__":
    main()
