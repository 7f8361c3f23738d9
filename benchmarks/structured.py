"""Answers that are held to a form, from a cluster that runs: are they valid, and what do their neighbours notice?

    .venv/bin/python -m benchmarks.structured schemas [--target HOST:PORT] [--count 200] [--seed 0] [--json FILE]
    .venv/bin/python -m benchmarks.structured neighbours [--target HOST:PORT] [--rounds 9] [--json FILE]

`schemas` asks for an answer to each of so many random JSON schemas, streamed, collected, two choices at once, and with
stop strings, and checks each with jsonschema. `neighbours` compares the time between tokens of plain answers beside
answers with a form to that beside as many others without one, in turn, so that both see the same machine.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jsonschema

from benchmarks.random_schemas import Schema, random_schema
from client import AsyncBatonClient, Delta, FinishReason, GenerateOptions

PROMPT = "Answer in JSON, please: what do you know of it?"
AT_ONCE = 8
PLAIN, COMPANIONS, TOKENS, SKIPPED = 4, 4, 192, 16  # streams that are timed, those beside, tokens of each, at first
FORMS: dict[str, GenerateOptions] = {
    "text": {"regex": "[a-z ]{4000}"},
    "json": {"json_schema": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2000}},
}


@dataclass(frozen=True, slots=True)
class Verdict:
    way: str  # it was asked for
    seed: int  # of the schema
    valid: bool
    text: str
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Ratios of the mean time between tokens of plain answers: with forms beside them, to without."""

    form: str
    plain_tbt_ms: float  # median over the rounds
    ratio_median: float
    ratios: tuple[float, ...]  # by round


async def verdicts(client: AsyncBatonClient, seeds: Sequence[int], max_tokens: int = 1500) -> list[Verdict]:
    """Every schema in every way."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> list[Verdict]:
        async with places:
            return await _verdicts(client, seed, max_tokens)

    return [verdict for of_seed in await asyncio.gather(*map(one, seeds)) for verdict in of_seed]


async def _verdicts(client: AsyncBatonClient, seed: int, max_tokens: int) -> list[Verdict]:
    schema = random_schema(seed)
    options: GenerateOptions = {"json_schema": schema, "max_tokens": max_tokens, "temperature": 1.0, "seed": seed}
    text = ""
    async with aclosing(client.generate(PROMPT, **options)) as stream:
        async for event in stream:
            text += event.text if isinstance(event, Delta) else ""
    found = [_judge("streamed", seed, schema, text)]
    two: GenerateOptions = {**options, "n": 2}
    collected = await client.complete(PROMPT, **two)
    found += [_judge("two choices", seed, schema, choice.text) for choice in collected.choices]
    stopping: GenerateOptions = {**options, "stop": ["}}", "]}"]}
    [cut] = (await client.complete(PROMPT, **stopping)).choices
    whole = cut.text + (cut.matched_stop if isinstance(cut.matched_stop, str) else "")
    begins = text.startswith(whole) and cut.finish_reason is FinishReason.STOP
    found.append(Verdict("cut by a stop", seed, begins, whole, "" if begins else f"is no beginning of {text}"))
    return found


def _judge(way: str, seed: int, schema: Schema, text: str) -> Verdict:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return Verdict(way, seed, False, text, str(error).splitlines()[0])
    return Verdict(way, seed, True, text)


async def neighbours(client: AsyncBatonClient, form: str, rounds: int) -> Neighbours:
    """Raises: ZeroDivisionError where answers are too short to be timed."""
    ratios, plain = [], []
    await _round(client, FORMS[form], 0)
    for number in range(1, rounds + 1):
        times = {}
        for formed in (True, False) if number % 2 else (False, True):
            times[formed] = await _round(client, FORMS[form] if formed else {"ignore_eos": True}, number)
        plain.append(times[False])
        ratios.append(times[True] / times[False])
    return Neighbours(form, statistics.median(plain), statistics.median(ratios), tuple(ratios))


async def _round(client: AsyncBatonClient, companion: GenerateOptions, seed: int) -> float:
    """Mean milliseconds between tokens of the plain answers."""
    more = TOKENS + TOKENS // 2  # companions begin before and end behind those that are timed
    beside = [
        asyncio.create_task(_timed(client, {**companion, "max_tokens": more, "temperature": 1.0, "seed": seed + each}))
        for each in range(COMPANIONS)
    ]
    plain: GenerateOptions = {"ignore_eos": True, "max_tokens": TOKENS, "temperature": 1.0, "seed": seed}
    gaps = await asyncio.gather(*(_timed(client, plain) for _ in range(PLAIN)))
    await asyncio.gather(*beside)
    return statistics.fmean(gaps)


async def _timed(client: AsyncBatonClient, options: GenerateOptions) -> float:
    """Mean milliseconds between tokens, after the first few."""
    tokens = counted = 0
    first = last = 0.0
    async with aclosing(client.generate(PROMPT, **options)) as stream:
        async for event in stream:
            if isinstance(event, Delta) and event.token_ids:
                last = time.perf_counter()
                if tokens <= SKIPPED:
                    first, counted = last, tokens + len(event.token_ids)
                tokens += len(event.token_ids)
    return (last - first) * 1e3 / (tokens - counted)


async def _main(arguments: argparse.Namespace) -> int:
    async with AsyncBatonClient(arguments.target, timeout_s=300) as client:
        if arguments.what == "neighbours":
            return _tell_neighbours(
                [await neighbours(client, form, arguments.rounds) for form in FORMS], arguments.json
            )
        seeds = range(arguments.seed, arguments.seed + arguments.count)
        return _tell_verdicts(await verdicts(client, seeds, arguments.max_tokens), arguments.json)


def _tell_verdicts(found: Sequence[Verdict], path: Path | None) -> int:
    for way in dict.fromkeys(verdict.way for verdict in found):
        of_way = [verdict for verdict in found if verdict.way == way]
        print(f"{way:>14}: {sum(verdict.valid for verdict in of_way)} of {len(of_way)} valid")
    bad = [verdict for verdict in found if not verdict.valid]
    for verdict in bad:
        print(f"schema {verdict.seed}, {verdict.way}: {verdict.fault}: {verdict.text[:200]!r}")
    counts = {"answers": len(found), "valid": len(found) - len(bad), "bad": [asdict(verdict) for verdict in bad]}
    _write(path, counts)
    return 1 if bad else 0


def _tell_neighbours(found: Sequence[Neighbours], path: Path | None) -> int:
    for each in found:
        spread = f"{min(each.ratios):.3f} to {max(each.ratios):.3f}"
        print(f"{each.form:>6}: {each.plain_tbt_ms:.2f} ms beside plain answers, x {each.ratio_median:.3f} ({spread})")
    _write(path, [asdict(each) for each in found])
    return 0


def _write(path: Path | None, figures: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["schemas", "neighbours"])
    parser.add_argument("--target", default=os.environ.get("BATON_TARGET", "127.0.0.1:50051"))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(_main(_arguments())))
