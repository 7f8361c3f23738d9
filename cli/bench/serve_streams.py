"""`baton bench serve --table`: prefill and decode tokens per second at fixed numbers of streams, servers side by side.

Prefill: all prompts at once, new ones, with one token of answer each; prompt tokens over the time until the last of
them came. Decode: the same prompts once more, which a prefix cache may know; tokens over the time in which every stream
was being answered, from the last one's first token to the first one's last.
"""

import asyncio
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from cli.bench.serve_jobs import Job, random_tokens
from cli.bench.serve_load import Load, Outcome, Run, Target
from cli.bench.serve_servers import Servers, opened
from cli.errors import CommandFailed


@dataclass(frozen=True, slots=True)
class TableOptions:
    servers: Servers
    streams: tuple[int, ...] = (1, 16)
    input_tokens: int = 512
    output_tokens: int = 128
    rounds: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class StreamSpeed:
    """Medians of the rounds; tokens per second of all streams together."""

    target: str
    streams: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


def run_streams_bench(options: TableOptions, as_json: bool) -> int:
    """Raises: CommandFailed."""
    speeds = asyncio.run(measure_streams(options))
    print(json.dumps([asdict(speed) for speed in speeds]) if as_json else as_table(speeds))
    return 0


async def measure_streams(options: TableOptions) -> list[StreamSpeed]:
    """Servers take turns in every round: other load on the machine meets all of them. Raises: CommandFailed."""
    speeds: list[StreamSpeed] = []
    async with opened(options.servers) as servers:
        for streams in options.streams:
            rounds: list[list[StreamSpeed]] = [[] for _ in servers]
            for number in range(options.rounds):
                for server, found in zip(servers, rounds, strict=True):
                    chance = random.Random(f"{options.seed}/{streams}/{number}")
                    prompts = [random_tokens(chance, options.input_tokens, server.vocab_size) for _ in range(streams)]
                    found.append(await _round(server.target, prompts, options.output_tokens))
            speeds += [_median(found) for found in rounds]
    return speeds


def as_table(speeds: Sequence[StreamSpeed]) -> str:
    width = max(len(speed.target) for speed in speeds)
    lines = [f"{'target':{width}}  streams  prefill tokens/s  decode tokens/s"]
    lines += [
        f"{speed.target:{width}}  {speed.streams:7}  {speed.prefill_tokens_per_s:16,.0f}"
        f"  {speed.decode_tokens_per_s:15,.1f}"
        for speed in speeds
    ]
    return "\n".join(lines)


def decode_tokens_per_s(outcomes: Sequence[Outcome]) -> float:
    """Of all streams while all of them ran. Pieces stand for as many tokens as their stream had for each of them.

    Raises: CommandFailed where that was never so: the first had ended before the last began.
    """
    begin = max(outcome.pieces_s[0] for outcome in outcomes)
    end = min(outcome.pieces_s[-1] for outcome in outcomes)
    if end <= begin:
        raise CommandFailed("the first answer ended before the last one began: --output-len must be larger")
    tokens = 0.0
    for outcome in outcomes:
        made = sum(begin < piece_s <= end for piece_s in outcome.pieces_s)
        tokens += made * outcome.output_tokens / len(outcome.pieces_s)
    return tokens / (end - begin)


async def _round(target: Target, prompts: Sequence[tuple[int, ...]], output_tokens: int) -> StreamSpeed:
    first = await _at_once(target, prompts, 1)
    longer = await _at_once(target, prompts, output_tokens)
    prompt_tokens = sum(map(len, prompts))
    prefill_s = max(outcome.pieces_s[0] for outcome in first.outcomes)
    return StreamSpeed(target.name, len(prompts), prompt_tokens / prefill_s, decode_tokens_per_s(longer.outcomes))


async def _at_once(target: Target, prompts: Sequence[tuple[int, ...]], output_tokens: int) -> Run:
    run = await Load(target, lambda: None).open_loop([Job(prompt, output_tokens) for prompt in prompts])
    for outcome in run.outcomes:
        if outcome.error:
            raise CommandFailed(f"{target.name}: {outcome.error}")
    return run


def _median(rounds: Sequence[StreamSpeed]) -> StreamSpeed:
    return StreamSpeed(
        rounds[0].target,
        rounds[0].streams,
        statistics.median(speed.prefill_tokens_per_s for speed in rounds),
        statistics.median(speed.decode_tokens_per_s for speed in rounds),
    )
