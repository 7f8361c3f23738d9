"""The engine of one process at work on prompts of one length, for engine benchmarks to time. Prints nothing."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cli.errors import CommandFailed
from engine.engine import Engine
from engine.mixed_scheduler import MixedScheduler
from engine.mixed_state import MixedOutcome, PromptComputed, RequestFailed, TokenMade
from engine.model_config import ModelError
from engine.pages import BlockPool
from engine.prepare import ModelOptions, PreparedModel, prepare_model
from engine.runner import Runner
from engine.sampling_params import SamplingParams
from engine.sequence import Request, blocks_for

BLOCK_TOKENS, STEP_TOKENS = 32, 512  # as `baton up` has them on a CPU
CACHE_ROOT = bytes(32)
KV_MARGIN_TOKENS = 64  # per sequence: two blocks, for tokens that sequences make while others' prompts are computed


@dataclass(frozen=True, slots=True)
class EngineSetup:
    folder: Path
    dtype: str
    quantize: str
    kv_cache_dtype: str
    batch: int  # sequences at once, at most
    tokens: int  # of a sequence, prompt and answer, at most
    step_tokens: int = STEP_TOKENS


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    setup: EngineSetup
    prepared: PreparedModel
    runner: Runner


def load_engine(setup: EngineSetup) -> LoadedEngine:
    """With KV for the largest batch. Raises: CommandFailed."""
    tokens = setup.tokens + setup.batch + KV_MARGIN_TOKENS
    roomy = ModelOptions(
        setup.folder,
        torch.device("cpu"),
        setup.dtype,
        BLOCK_TOKENS,
        kv_memory_bytes=1 << 50,
        max_model_len=None,
        kv_cache_dtype=setup.kv_cache_dtype,
        quantize=setup.quantize,
    )
    try:
        kv_bytes = setup.batch * blocks_for(tokens, BLOCK_TOKENS) * prepare_model(roomy).layout.block_bytes
        prepared = prepare_model(replace(roomy, kv_memory_bytes=kv_bytes, max_model_len=tokens))
        runner = prepared.load(torch.empty(prepared.pool_bytes, dtype=torch.uint8), progress=False)
    except ModelError as error:
        raise CommandFailed(str(error)) from error
    runner.warm_up()
    return LoadedEngine(setup, prepared, runner)


class EngineRun:
    """`batch` sequences at once on a loaded model, greedy and never ended early, with a prefix cache of its own."""

    def __init__(self, loaded: LoadedEngine, batch: int) -> None:
        prepared = loaded.prepared
        self.first_tokens: tuple[int, ...] = ()  # of the prompts of the last `prefill_s`
        self._scheduler = MixedScheduler(
            BlockPool(prepared.total_blocks), prepared.layout.block_tokens, loaded.setup.step_tokens, batch
        )
        self._engine = Engine(loaded.runner, self._scheduler)
        self._requests = 0

    def prefill_s(self, prompts: Sequence[Sequence[int]]) -> float:
        """Until every prompt has its first token. Raises: CommandFailed."""
        self._add(prompts, new_tokens=1)
        made: dict[int, int] = {}
        started = time.perf_counter()
        while (outcomes := self._step()) is not None:
            made |= {each.request_id: each.drawn.token_id for each in outcomes if isinstance(each, TokenMade)}
        took_s = time.perf_counter() - started
        self.first_tokens = tuple(token for _, token in sorted(made.items()))
        return took_s

    def decode_steps_s(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[float]:
        """Of as many steps, in each of which every sequence makes a token.

        The prompts are in the cache if `prefill_s` had them last. Raises: CommandFailed.
        """
        waiting = len(prompts)
        steps: list[float] = []
        self._add(prompts, new_tokens + len(prompts))  # the first to begin continues until all have begun
        while True:
            started = time.perf_counter()
            outcomes = self._step()
            if outcomes is None:
                return steps[:new_tokens]
            if not waiting:
                steps.append(time.perf_counter() - started)
            waiting -= sum(isinstance(outcome, PromptComputed) and outcome.ended for outcome in outcomes)

    def _add(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        params = SamplingParams(max_tokens=new_tokens)
        for prompt in prompts:
            self._scheduler.add(Request(self._requests, tuple(prompt), params, ()), CACHE_ROOT)
            self._requests += 1

    def _step(self) -> Sequence[MixedOutcome] | None:
        outcomes = self._engine.step()
        if outcomes is not None and any(isinstance(outcome, RequestFailed) for outcome in outcomes):
            raise CommandFailed("the model's logits are not finite")
        return outcomes


def random_prompts(vocab_size: int, batch: int, tokens: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(range(vocab_size), k=tokens) for _ in range(batch)]
