"""How much of what a cache without bounds would find is found in a pool of a tenth of the working set, and in files.

    .venv/bin/python -m baton.lab.benchmarks.transfer.tier_working_set --model FOLDER [--tokens 2048] [--share 0.1]
                                               [--kv-memory 256MiB] [--json FILE]

A prefill worker computes as many prompts as make the working set, and writes their KV behind. Then each of them comes
once more, in random order, with one block of its own behind it, so that a cache without bounds would find the whole
prompt. The same once more without files. Times are to the first token.
"""

import asyncio
import random
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton.lab.benchmarks.report.result import Columns, read_arguments, table, write_result
from baton.lab.benchmarks.transfer.tier_restart import stored, warm_up
from baton.lab.benchmarks.transfer.worker_pair import (
    BLOCK_TOKENS,
    WorkerSession,
    make_command,
    new_prompt,
    worker_process,
)
from baton.protos import session_pb2


@dataclass(frozen=True, slots=True)
class Setup:
    model: Path
    tokens: int  # of a prompt, whole blocks
    share: float  # of the working set that the pool holds
    kv_memory: str
    directory: Path | None  # of the files; None: the system's for temporary ones


@dataclass(frozen=True, slots=True)
class Found:
    """By prompts that came once more."""

    variant: str
    prompts: int
    pool_by_working_set: float
    computed_ms: float  # median, of the first time
    again_ms: float  # median
    again_p99_ms: float
    cached_tokens: int
    ideal_tokens: int

    @property
    def of_ideal(self) -> float:
        return self.cached_tokens / self.ideal_tokens


async def ask(worker: WorkerSession, tokens: list[int]) -> tuple[float, Any]:
    """Seconds to the first token, and its event."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    heard = await worker.prefill(session_pb2.Prefill(**make_command(tokens, 1)))
    return loop.time() - began, heard.event


async def measure(setup: Setup, variant: str, directory: Path) -> Found:
    tier = ("--kv-tier-dir", directory, "--kv-tier-size", "64GiB") if variant == "files" else ()
    with worker_process("prefill", setup.model, "--kv-memory", setup.kv_memory, *tier) as started:
        async with WorkerSession(started.endpoint) as worker:
            pool_blocks = worker.worker.total_blocks
            prompts = round(pool_blocks * BLOCK_TOKENS / setup.share / setup.tokens)
            known = [new_prompt(worker, setup.tokens) for _ in range(prompts)]
            block_bytes = await warm_up(worker, directory) if tier else 0
            computed_s = [(await ask(worker, prompt + new_prompt(worker, 1)))[0] for prompt in known]
            if tier:
                await stored(directory, prompts * setup.tokens // BLOCK_TOKENS * block_bytes)
            random.Random(0).shuffle(known)
            again = [await ask(worker, prompt + new_prompt(worker, BLOCK_TOKENS)) for prompt in known]
    again_s = sorted(seconds for seconds, _ in again)
    return Found(
        variant=variant,
        prompts=prompts,
        pool_by_working_set=pool_blocks * BLOCK_TOKENS / (prompts * setup.tokens),
        computed_ms=statistics.median(computed_s) * 1e3,
        again_ms=statistics.median(again_s) * 1e3,
        again_p99_ms=again_s[int(0.99 * (len(again_s) - 1))] * 1e3,
        cached_tokens=sum(event.timings.cached_tokens for _, event in again),
        ideal_tokens=prompts * setup.tokens,
    )


COLUMNS: Columns[Found] = {
    "variant": lambda found: found.variant,
    "prompts": lambda found: found.prompts,
    "pool by working set": lambda found: f"{found.pool_by_working_set:.2f}",
    "computed ms": lambda found: f"{found.computed_ms:.0f}",
    "again ms": lambda found: f"{found.again_ms:.0f}",
    "again p99 ms": lambda found: f"{found.again_p99_ms:.0f}",
    "of an ideal cache": lambda found: f"{found.of_ideal:.3f}",
}


def main() -> None:
    options = read_arguments(
        __doc__, model=Path, tokens=2048, share=0.1, kv_memory="256MiB", directory=(None, "of the files")
    )
    setup = Setup(options.model, options.tokens, options.share, options.kv_memory, options.directory)
    rows = []
    for variant in ("pool alone", "files"):
        with tempfile.TemporaryDirectory(dir=setup.directory) as directory:
            rows.append(asyncio.run(measure(setup, variant, Path(directory))))
        print(table(rows[-1:], COLUMNS), flush=True)
    print(table(rows, COLUMNS))
    as_written = [{**asdict(row), "of_ideal": row.of_ideal} for row in rows]
    write_result(options.json, {"model": options.model.name, "tokens": setup.tokens, "rows": as_written})


if __name__ == "__main__":
    main()
