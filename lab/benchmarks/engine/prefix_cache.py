"""What prefix caching saves when prompts share a prefix, and what it costs when they do not.

    .venv/bin/python -m baton.lab.benchmarks.engine.prefix_cache [--model FOLDER] [--json FILE]

Three measurements at the level of the engine, each a ratio within one run:

* second question: vLLM's example of prefix caching. One table of about 1 000 tokens, two questions; a new table every
  time. The second question's time to first token, over the time that computing its uncached tokens takes where they
  stand, behind a prefix whose KV lies ready, and over that of the same tokens as a prompt of their own, which do not
  look at a prefix at all.
* shared: prompts that share 90 % of their tokens, over prompts that share nothing; beside it the ratio of uncached
  tokens, which is what the throughput should follow.
* cost: CPU time spent in hashing, looking up and publishing while nothing is ever found, over the CPU time of the
  steps. Attributed, not a difference of two throughputs; the clocks around each call are counted in.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton.engine.kv_cache.block_pool import BlockPool, BlockTable
from baton.engine.offline.core import OfflineEngine
from baton.engine.offline.engine_args import EngineArgs
from baton.engine.offline.params import SamplingParams
from baton.engine.offline.prompts import Prompt
from baton.engine.request import Chunk, Plan, Sample
from baton.engine.sampling.params import SamplingParams as EngineSampling
from baton.engine.scheduler.sequences import ScheduledSequence, TokenMade
from baton.lab.benchmarks.report.result import DEMO, read_arguments, write_result
from baton.lab.benchmarks.wrapped_process import Meter
from baton.lab.tableqa.train_data import people, table

ROWS = 72  # of a table: about 1 000 tokens
SHARED_TOKENS, OWN_TOKENS = 960, 64
BLOCK_TOKENS = 32
PROMPTS = 40


@dataclass(frozen=True)
class SecondQuestion:
    prompt_tokens: float
    uncached_tokens: float
    first_ms: float
    second_ms: float
    uncached_in_place_ms: float
    uncached_apart_ms: float
    ratio: float  # second over uncached in place, median of all repetitions
    ratio_apart: float  # second over uncached apart
    right: int
    asked: int


@dataclass(frozen=True)
class Shared:
    speedup: float  # of prompt tokens per second
    token_ratio: float  # all tokens over uncached tokens
    followed: float  # speedup over token_ratio


@dataclass(frozen=True)
class Cost:
    step_cpu_ms: float
    cache_cpu_ms: float
    share: float


def main() -> None:
    arguments = read_arguments(__doc__, model=str(DEMO), repetitions=20)
    report: dict[str, Any] = {"model": Path(arguments.model).name}
    measurements: dict[str, Callable[[str, int], Any]] = {
        "second_question": second_question,
        "shared": shared_prefix,
        "cost": cost_without_hits,
    }
    for name, measure in measurements.items():
        gc.collect()
        gc.freeze()  # what earlier measurements left is not collected inside this one
        result = measure(arguments.model, arguments.repetitions)
        report[name] = asdict(result)
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in asdict(result).items()), flush=True)
    write_result(arguments.json, report)


def second_question(model: str, repetitions: int) -> SecondQuestion:
    engine, bare = _engine(model), _engine(model)  # no request of the second holds a page
    draw = random.Random(1)
    times: list[tuple[float, float, float, float, int, int]] = []
    right = 0
    for _ in range(repetitions):
        persons = people(draw, ROWS)
        one, other = draw.sample(persons, 2)
        prompts = [
            engine.reader.read_chat(
                [
                    {"role": "system", "content": table(persons)},
                    {"role": "user", "content": f"How old is {person.name}?"},
                ],
                add_generation_prompt=True,
            )
            for person in (one, other)
        ]
        first_s, _ = _time_to_first_token(engine, prompts[0])
        second_s, cached_tokens = _time_to_first_token(engine, prompts[1])
        in_place_s = _time_of_chunk(bare, prompts[1].token_ids, cached_tokens)
        apart_s, _ = _time_to_first_token(engine, Prompt(None, prompts[1].token_ids[cached_tokens:]))
        tokens = len(prompts[1].token_ids)
        times.append((first_s, second_s, in_place_s, apart_s, tokens, tokens - cached_tokens))
        right += f"{other.name} is {other.age} years old." in _answer(engine, prompts[1])
    first, second, in_place, apart, tokens, uncached = (
        statistics.median(column) for column in zip(*times, strict=True)
    )
    return SecondQuestion(
        prompt_tokens=tokens,
        uncached_tokens=uncached,
        first_ms=first * 1e3,
        second_ms=second * 1e3,
        uncached_in_place_ms=in_place * 1e3,
        uncached_apart_ms=apart * 1e3,
        ratio=statistics.median(time_s[1] / time_s[2] for time_s in times),
        ratio_apart=statistics.median(time_s[1] / time_s[3] for time_s in times),
        right=right,
        asked=repetitions,
    )


def shared_prefix(model: str, repetitions: int) -> Shared:
    """The prefix of all prompts is computed before the clock starts; interleaved, the median of the pairs."""
    engine = _engine(model)
    draw = random.Random(2)
    speedups = []
    for _ in range(max(3, repetitions // 4)):
        prefix = _random_tokens(engine, draw, SHARED_TOKENS)
        _run(engine, [prefix])
        sharing = [prefix + _random_tokens(engine, draw, OWN_TOKENS) for _ in range(PROMPTS)]
        apart = [_random_tokens(engine, draw, SHARED_TOKENS + OWN_TOKENS) for _ in range(PROMPTS)]
        speedups.append(_run(engine, apart) / _run(engine, sharing))
    speedup = statistics.median(speedups)
    token_ratio = (SHARED_TOKENS + OWN_TOKENS) / OWN_TOKENS
    return Shared(speedup, token_ratio, speedup / token_ratio)


def cost_without_hits(model: str, repetitions: int) -> Cost:
    """The last measurement: what it wraps stays wrapped."""
    engine = _engine(model)
    draw = random.Random(3)
    meter = Meter()
    for owner, name in ((ScheduledSequence, "reusable_hashes"), (BlockPool, "lookup"), (ScheduledSequence, "publish")):
        meter.wrap("cache", owner, name)
    began = time.thread_time_ns()
    for _ in range(repetitions):
        _run(engine, [_random_tokens(engine, draw, 512) for _ in range(8)], max_tokens=64)
    total = time.thread_time_ns() - began
    spent = meter.nanoseconds["cache"]
    return Cost(total / 1e6, spent / 1e6, spent / total)


def _engine(model: str) -> OfflineEngine:
    engine = OfflineEngine(
        EngineArgs(model=model, dtype="float32", max_num_batched_tokens=2048, block_size=BLOCK_TOKENS, quiet=True)
    )
    engine.runner.warm_up()
    return engine


def _random_tokens(engine: OfflineEngine, draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(10, 1000) for _ in range(count))


def _time_to_first_token(engine: OfflineEngine, prompt: Prompt) -> tuple[float, int]:
    """Seconds, and the tokens that came from the cache."""
    request = engine.request(prompt, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    began = time.perf_counter()
    engine.add(request)
    while not (made := _tokens(engine)):
        pass
    took_s = time.perf_counter() - began
    while engine.scheduler.has_work:
        engine.step()
    return took_s, made[0].cached_tokens


def _time_of_chunk(engine: OfflineEngine, token_ids: tuple[int, ...], start: int) -> float:
    """Seconds for the tokens from `start` on: the model and one greedy token, without any scheduler."""
    pool = BlockPool(-(-len(token_ids) // BLOCK_TOKENS))  # of our own, over an engine without requests
    table = BlockTable(pool, ())
    table.append(pool.total_blocks)
    sample = Sample(0, EngineSampling(max_tokens=1))
    engine.runner.run(Plan((Chunk(0, token_ids[:start], 0, table.blocks),)))
    chunk = Chunk(0, token_ids[start:], start, table.blocks, (sample,))
    began = time.perf_counter()
    engine.runner.run(Plan((chunk,)))
    return time.perf_counter() - began


def _tokens(engine: OfflineEngine) -> list[TokenMade]:
    return [outcome for outcome in engine.step() or () if isinstance(outcome, TokenMade)]


def _answer(engine: OfflineEngine, prompt: Prompt) -> str:
    engine.add(engine.request(prompt, SamplingParams(max_tokens=64, temperature=0.0)))
    made: list[int] = []
    while engine.scheduler.has_work:
        made += [token.drawn.token_id for token in _tokens(engine)]
    return str(engine.reader.tokenizer.decode(made))


def _run(engine: OfflineEngine, prompts: list[tuple[int, ...]], max_tokens: int = 1) -> float:
    """Seconds for all of them together."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    requests = [engine.request(Prompt(None, tokens), params) for tokens in prompts]
    began = time.perf_counter()
    for request in requests:
        engine.add(request)
    while engine.scheduler.has_work:
        engine.step()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
