"""Train the demo model: a small Llama that answers questions about a table in its prompt.

    python -m baton.lab.tableqa.train OUT [--steps 3600] [--seed 0] [--processes 2] [--resume CHECKPOINT]

Each process has one thread and draws its own batches; the gradients of all are averaged in every step.

Needs no other packages than Baton. README.md in this folder describes how the shipped weights were trained.
"""

import argparse
import math
import multiprocessing
import random
import tempfile
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from baton.lab.tableqa.batches import STAGES, Batches, TrainBatch
from baton.lab.tableqa.heads import HEAD, HIDDEN, ROPE_THETA
from baton.lab.tableqa.start import prepare
from baton.lab.tableqa.tokens import CONTEXT_TOKENS, make_tokenizer

# Moving average of the accuracy above which the next stage begins.
STAGE_PASSED = 0.85
SAVE_EVERY_STEPS = 50
SAY_EVERY_STEPS = 25


@dataclass
class TrainProgress:
    stage: int = 0
    tokens: int = 0
    # Moving average of the accuracy on facts that only the table has.
    accuracy: float = 0.0
    # Whether the model has learned to copy.
    copies: bool = False


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=HIDDEN,
            intermediate_size=288,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=HEAD,
            max_position_embeddings=CONTEXT_TOKENS,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            tie_word_embeddings=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )
    prepare(model, tokenizer)
    return model


def add_up(model: LlamaForCausalLM) -> None:
    """Average the gradients of all processes."""
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    flat = torch.cat([each.flatten() for each in gradients])
    distributed.all_reduce(flat)
    flat /= distributed.get_world_size()
    for gradient, mean in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def agreed(*numbers: float) -> list[float]:
    """Return the mean of each number over all processes, so that all processes make the same decision."""
    mean = torch.tensor(numbers, dtype=torch.float64)
    distributed.all_reduce(mean)
    return (mean / distributed.get_world_size()).tolist()


def backward(model: LlamaForCausalLM, batch: TrainBatch) -> tuple[float, float]:
    """Compute the gradients; return the loss, and the accuracy on tokens that only the table determines."""
    targets, weights = batch.tokens[:, 1:], batch.weights[:, 1:]
    chosen = weights > 0
    targets, weights = targets[chosen], weights[chosen]
    hidden = model.model(batch.tokens).last_hidden_state[:, :-1]
    # Logits are computed only for tokens in the loss, since they are most of this model's work.
    logits = model.lm_head(hidden[chosen])
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    add_up(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    decisive = weights > 0.6
    accuracy = (logits.argmax(-1) == targets)[decisive].float().mean().item() if decisive.any() else 0.0
    return loss.item(), accuracy


def advance(progress: TrainProgress, share_done: float) -> bool:
    """Go to the next stage if the accuracy suffices, late in training to the last stage. Return whether it changed."""
    last = len(STAGES) - 1
    if progress.accuracy > STAGE_PASSED and progress.stage < last:
        progress.stage += 1
        progress.accuracy = 0.0
        return True
    if progress.stage < last and share_done > 0.6:
        progress.stage = last
        return True
    return False


def learning_rate(peak: float, step: int, share_done: float) -> float:
    """Return the learning rate of a step: linear warm-up, then half a cosine over all steps."""
    warm_up = min(1.0, (step + 1) / 20)
    return peak * warm_up * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, share_done))))


class TrainOptions(NamedTuple):
    out: str
    steps: int
    seed: int
    peak: float
    processes: int
    resume: str | None


def train(rank: int, options: TrainOptions, meeting: str) -> None:
    """Train in one of the processes; only the first one logs and writes checkpoints."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=options.processes)
    torch.manual_seed(options.seed)
    rng, resume = random.Random(options.seed), options.resume
    tokenizer = PreTrainedTokenizerFast.from_pretrained(resume) if resume else make_tokenizer(rng)
    model = LlamaForCausalLM.from_pretrained(resume, dtype=torch.float32) if resume else make_model(tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say = print if rank == 0 else lambda *_, **__: None
    say(f"{parameters / 1e6:.2f} M parameters, vocabulary {len(tokenizer)}", flush=True)
    own_seed = options.seed * options.processes + rank
    rng = random.Random(own_seed)
    shared = random.Random(options.seed)
    batches = Batches(tokenizer, rng, torch.Generator().manual_seed(own_seed))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    # A resumed run starts at the last stage.
    progress = TrainProgress(stage=len(STAGES) - 1 if resume else 0, copies=True)
    start = time.monotonic()
    for step in range(options.steps):
        share = step / options.steps
        if advance(progress, share):
            say(f"-- stage {progress.stage}", flush=True)
        copying = not progress.copies or shared.random() < 0.03
        batch = batches.copying() if copying else batches.dialogues(progress.stage)
        loss, accuracy = backward(model, batch)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options.peak, step, share)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss, accuracy, tokens = agreed(loss, accuracy, batch.tokens.numel())
        progress.tokens += round(tokens * options.processes)
        if copying:
            progress.copies = progress.copies or accuracy > 0.95
        else:
            progress.accuracy = 0.97 * progress.accuracy + 0.03 * accuracy
        if step % SAY_EVERY_STEPS == 0:
            minutes, cpu = (time.monotonic() - start) / 60, time.process_time() / 60
            kind = "copy" if copying else "table"
            say(f"step {step}, {minutes:.1f} min, {cpu:.1f} of CPU, {progress}", flush=True)
            say(f"    {kind}: loss {loss:.3f}, accuracy {accuracy:.3f}", flush=True)
        if rank == 0 and (step + 1) % SAVE_EVERY_STEPS == 0:
            save(model, tokenizer, options.out)
    if rank == 0:
        save(model.to(torch.bfloat16), tokenizer, options.out)
    distributed.destroy_process_group()


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: str) -> None:
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--resume", help="a checkpoint of this script: skip to the last stage")
    options = TrainOptions(**vars(parser.parse_args()))
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        others = [
            context.Process(target=train, args=(rank, options, f"{folder}/meeting"), daemon=True)
            for rank in range(1, options.processes)
        ]
        for other in others:
            other.start()
        train(0, options, f"{folder}/meeting")
        for other in others:
            other.join()


if __name__ == "__main__":
    main()
