"""Cost of computing prompts in one process and answers in another.

    .venv/bin/python -m baton.lab.benchmarks.transfer.hand_over [--model FOLDER] [--kv-cache-dtype auto|float32|...]
                                           [--prompt-tokens 2048] [--rounds 9] [--json FILE]

One prefill and one decode worker run on the cores that `baton up` would give them; this process is their router, on the
router's core. All times are of the machine's monotonic clock and from the same run:

* hand-over: from the end of the prompt's last chunk on the prefill engine to the start of the first step on an idle
  decode worker. Its stages: the prefill worker's event loop moves the watermark to the end of the prompt; the
  watermark reaches the decode worker; the last blocks are copied; a round trip confirms the copy; the decode engine
  begins the step.
* added TTFT: time that a pull of the prompt's KV by the decode worker adds to the time to first token, as a fraction.
  Requests without and with a pull alternate, each with new tokens; the result is the median.
* pull: GB/s of the copies, next to a plain memcpy of the same size on the same core.
* hidden: share of the copying that was done before the last chunk ended.
* time between tokens of one long answer: alone, next to prompts that are not pulled, and next to pulled prompts.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from baton.lab.benchmarks.transfer.marked_worker import StageMarks
from baton.lab.benchmarks.transfer.worker_pair import BLOCK_TOKENS, PairSession, WorkerPair, worker_process
from baton.lab.report.limits import shortest
from baton.lab.report.result import DEMO, make_result, read_arguments, write_result
from baton.launch.devices import plan_cores, write_cores

WARM_UP_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class HandOverStages:
    """Milliseconds of the consecutive stages of one hand-over."""

    news: float  # from the end of the last chunk until the prefill worker's event loop moves the watermark
    way: float  # until the decode worker has the watermark and has finished earlier copies
    copy: float  # copy of the blocks that the last watermark released
    confirm: float  # round trip that confirms the copy
    activate: float  # until the first decode step begins
    total: float


@dataclass(frozen=True, slots=True)
class Between:
    """Milliseconds between tokens."""

    p50: float
    p99: float
    longest: float


@dataclass(frozen=True, slots=True)
class HandOverRound:
    stages: HandOverStages
    hidden: float  # fraction of the copying that was done before the last chunk ended
    ttft_ms: float  # time to first token if the prompt is not pulled
    added_ttft: float  # time that a pull adds to `ttft_ms`, as a fraction of it
    pull_gb_per_s: float


@dataclass(frozen=True, slots=True)
class HandOverResult:
    """Medians over the rounds."""

    prompt_tokens: int
    kv_cache_dtype: str
    kv_bytes: int
    transport: str
    hand_over_ms: HandOverStages
    hand_over_p90_ms: float
    ttft_ms: float
    added_ttft: float
    pull_gb_per_s: float
    memcpy_gb_per_s: float
    hidden: float
    quiet: Between
    computing: Between
    pulling: Between
    rounds: tuple[HandOverRound, ...]


def stages_of(prefill_marks: StageMarks, decode_marks: StageMarks, since: float) -> tuple[HandOverStages, float]:
    """Return the stages of the only hand-over after `since`, and the fraction of its copying that was hidden."""
    prefill, decode = prefill_marks.since(since), decode_marks.since(since)
    ended = [end for name, _, end in prefill if name == "step"][-1]
    advanced = [begin for name, begin, _ in prefill if name == "advance"][-1]
    copies = [(begin, end) for name, begin, end in decode if name == "copy"]
    asked, confirmed = next((begin, end) for name, begin, end in decode if name == "confirm")
    stepped = next(begin for name, begin, _ in decode if name == "step" and begin >= confirmed)
    copying = copies[-1][0]
    early_s = sum(max(0.0, min(end, ended) - begin) for begin, end in copies)
    hidden = early_s / sum(end - begin for begin, end in copies)
    moments = (ended, advanced, copying, asked, confirmed, stepped)
    news, way, copy, confirm, activate = ((later - earlier) * 1e3 for earlier, later in pairwise(moments))
    return HandOverStages(news, way, copy, confirm, activate, total=(stepped - ended) * 1e3), hidden


async def measure_time_between_tokens(
    workers: WorkerPair, prompt_tokens: int, tokens: int
) -> tuple[Between, Between, Between]:
    """Measure one answer three times: alone, next to prompts without pulls, and next to prompts that are pulled."""
    found = []
    for name, pulled in (("nothing", None), ("prompts", False), ("prompts that are pulled", True)):
        note(f"time between tokens beside {name}")
        ready = asyncio.Event()
        answer = asyncio.create_task(workers.answer(BLOCK_TOKENS, tokens, on_token=ready.set))
        await ready.wait()
        while pulled is not None and not answer.done():
            await workers.answer(prompt_tokens, 1, pulled)
        gaps_ms = [(later - earlier) * 1e3 for earlier, later in pairwise((await answer).times)]
        found.append(Between(*(float(ms) for ms in np.percentile(gaps_ms, (50, 99, 100)))))
    quiet, computing, pulling = found
    return quiet, computing, pulling


def note(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


def memcpy_gb_per_s(nbytes: int) -> float:
    """Return the GB/s of a copy on the calling thread, between buffers whose pages are already mapped."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return nbytes / 1e9 / shortest(lambda: np.copyto(target, source))


async def measure(
    workers: WorkerPair, marks: tuple[StageMarks, StageMarks], options: argparse.Namespace
) -> HandOverResult:
    rounds: list[HandOverRound] = []
    landed: Any = None
    tokens = options.prompt_tokens
    for number in range(WARM_UP_ROUNDS + options.rounds):
        alone_s = (await workers.answer(tokens, 1, pulled=False)).first_s
        began = time.monotonic()
        pulled = await workers.answer(tokens, 4)
        if number < WARM_UP_ROUNDS:
            continue  # warm-up: the first copies also map the pages
        found, share = stages_of(*marks, began)
        landed = pulled.landed
        ratio = pulled.first_s / alone_s
        rounds.append(HandOverRound(found, share, alone_s * 1e3, ratio - 1, landed.bytes / 1e6 / landed.copy_ms))
        counted = f"round {len(rounds)} of {options.rounds}"
        note(f"{counted}: {found.total:.2f} ms, TTFT {ratio:.4f} of that without a pull")
    middle = [statistics.median(getattr(each.stages, name) for each in rounds) for name in HandOverStages.__slots__]
    between = await measure_time_between_tokens(workers, tokens, options.answer_tokens)
    return HandOverResult(
        tokens,
        options.kv_cache_dtype,
        landed.bytes,
        landed.transport,
        HandOverStages(*middle),
        float(np.percentile([each.stages.total for each in rounds], 90)),
        statistics.median(each.ttft_ms for each in rounds),
        statistics.median(each.added_ttft for each in rounds),
        statistics.median(each.pull_gb_per_s for each in rounds),
        memcpy_gb_per_s(landed.bytes),
        statistics.median(each.hidden for each in rounds),
        *between,
        tuple(rounds),
    )


async def run(options: argparse.Namespace) -> HandOverResult:
    plan = plan_cores(sorted(os.sched_getaffinity(0)), prefill=1, decode=1)
    transfer = write_cores(plan.transfer)
    with ExitStack() as undo:
        scratch = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="baton-hand-over-")))
        marks = (StageMarks(scratch / "prefill"), StageMarks(scratch / "decode"))
        flags = ["--dtype", options.dtype, "--kv-cache-dtype", options.kv_cache_dtype, "--transport", options.transport]
        flags += ["--kv-memory", "1GiB", "--transfer-cores", transfer]
        cores = (write_cores(plan.prefill[0]), write_cores(plan.decode[0]))
        endpoints = [
            undo.enter_context(
                worker_process(role, options.model, "--cores", core, *flags, marks=mark.path, threads=1)
            ).endpoint
            for role, mark, core in zip(("prefill", "decode"), marks, cores, strict=True)
        ]
        os.sched_setaffinity(0, plan.router)
        async with PairSession(endpoints[0]) as prefill, PairSession(endpoints[1]) as decode:
            return await measure(WorkerPair(decode, prefill, hashed=True), marks, options)


def main() -> None:
    options = read_arguments(
        __doc__,
        model=DEMO,
        dtype="bfloat16",
        kv_cache_dtype="auto",
        transport="auto",
        prompt_tokens=2048,
        answer_tokens=(256, "length of the answer whose time between tokens is measured"),
        rounds=9,
    )
    result = asyncio.run(run(options))
    found = asdict(result)
    rounds = found.pop("rounds")
    for name, value in found.items():
        shown = ", ".join(f"{part} {ms:.3f}" for part, ms in value.items()) if isinstance(value, dict) else value
        print(f"{name}: {shown}")
    measures = ("kvtransfer", "worker", "prefill_worker", "decode_worker", "engine/scheduler")
    write_result(options.json, make_result(measures, rounds, None, model=options.model.name, **found))


if __name__ == "__main__":
    main()
