"""Protocol of `./baton bench peers`: after an engine has loaded, each line requests a round and is answered by a line.

    -> {"batch": 16, "prompt_tokens": 512, "new_tokens": 48, "seed": 3, "vocab_size": 49152}
    <- {"prefill_s": 2.5, "decode_step_s": 0.028, "first_tokens": [17, 5, ...]}

Standard library alone: this runs in every peer's own environment. A round is the same work for all of them: `batch`
prompts of random tokens until each has its first token, then `new_tokens` steps in which every sequence generates a
token, greedily and without stopping at an end token.
"""

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

RESERVED_TOKENS = 10  # first ids of a vocabulary, which are often special tokens


@dataclass(frozen=True)
class RoundWork:
    batch: int
    prompt_tokens: int
    new_tokens: int
    seed: int
    vocab_size: int

    def prompts(self) -> list[list[int]]:
        draw = random.Random(self.seed)
        tokens = range(RESERVED_TOKENS, self.vocab_size)
        return [draw.choices(tokens, k=self.prompt_tokens) for _ in range(self.batch)]


@dataclass(frozen=True)
class Round:
    prefill_s: float  # time until every prompt has its first token
    steps_s: Sequence[float]  # duration of each step in which every sequence generates a token
    first_tokens: Sequence[int]  # one per prompt; engines mostly agree on them


class Stopwatch:
    """Stopwatch of laps in seconds."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        lap, self._started = now - self._started, now
        return lap


def claim_stdout() -> TextIO:
    """Reserve stdout for answers and send what libraries print to stderr; call it before importing them."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def serve(answers: TextIO, version: str, run: Callable[[RoundWork], Round]) -> None:
    """Answer requests until stdin ends."""
    print(json.dumps({"version": version}), file=answers, flush=True)
    for line in sys.stdin:
        measured = run(RoundWork(**json.loads(line)))
        answer = {
            "prefill_s": measured.prefill_s,
            "decode_step_s": statistics.median(measured.steps_s),
            "first_tokens": list(measured.first_tokens),
        }
        print(json.dumps(answer), file=answers, flush=True)
