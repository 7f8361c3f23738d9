"""Predictions of `baton replay` compared with the truth: the same load on real processes, without and with each change.

    .venv/bin/python -m baton.lab.replay.measure [--model models/tableqa] [--rounds 3] [--json lab/replay/past.json]

Each round runs the load twice on one prefill and one decode worker, then with each change. The record of the first run
predicts the run with the change. The difference between the two equal runs is the least error that can be expected.
"""

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from baton.cli.bundle.command import MAX_FILE_BYTES, RECORD_MS
from baton.cli.bundle.decided import decided_record
from baton.client import AsyncAdminClient, AsyncBatonClient
from baton.lab.harness.processes import ONCE, HarnessWorker, RunningCluster, router_and_workers
from baton.lab.replay.command import predicted
from baton.lab.replay.past import PastPrediction, PastPredictions
from baton.lab.replay.predict import WhatIf
from baton.lab.replay.record import RecordedRequest, read_record
from baton.lab.report.result import DEMO, SERVICE, make_result, read_arguments, write_result
from baton.lab.report.statistics import percentile

REQUESTS, LONG_EVERY = 40, 8
SHORT_TOKENS, LONG_TOKENS, ANSWER_TOKENS = 200, 1600, 24
LONGEST = f"load-{LONG_EVERY - 1}"  # first request with a long prompt
CHANGES = (WhatIf(without=(LONGEST,)), WhatIf(add_prefill=1))
MEASURES = (*SERVICE, "lab/replay", "lab/sizing", "lab/simulation")


async def run_load(cluster: RunningCluster, without: Sequence[str], gap_s: float) -> None:
    """Send the load: every LONG_EVERYth prompt is long. Arrivals and prompts are equal in all runs."""
    chance = random.Random(0)
    arrivals = [(f"load-{n}", chance.expovariate(1 / gap_s), chance.randbytes(LONG_TOKENS)) for n in range(REQUESTS)]
    async with AsyncBatonClient(cluster.target, timeout_s=600.0, retry=ONCE) as baton, asyncio.TaskGroup() as group:
        for number, (request_id, wait_s, content) in enumerate(arrivals):
            await asyncio.sleep(wait_s)
            if request_id in without:
                continue
            tokens = LONG_TOKENS if number % LONG_EVERY == LONG_EVERY - 1 else SHORT_TOKENS
            prompt = [3 + byte for byte in content[:tokens]]
            answer = baton.complete(prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True, request_id=request_id)
            group.create_task(answer)


async def recorded(model: Path, folder: Path, name: str, what_if: WhatIf, gap_s: float) -> Path:
    """Run the load with a change on processes of its own; return the file with its record."""
    counts = {"prefill": 1 + what_if.add_prefill, "decode": 1 + what_if.add_decode}
    flags = ("--model", model, "--kv-memory", "256MiB", "--log-level", "warning")
    workers = [
        HarnessWorker(f"{role}-{number}", f"baton.{role}_worker", flags)
        for role, count in counts.items()
        for number in range(count)
    ]
    async with router_and_workers(folder, workers, ("--log-level", "warning"), f"{name}-") as cluster:
        await run_load(cluster, what_if.without, gap_s)
        async with AsyncAdminClient(cluster.admin_target, timeout_s=60.0) as admin:
            timelines = await admin.timelines(last_ms=RECORD_MS, with_inputs=True)
    file = folder / f"{name}.json"
    file.write_text(json.dumps(decided_record([timelines], MAX_FILE_BYTES)))
    return file


def compare(first: Path, again: Path, changed: Path, what_if: WhatIf) -> PastPrediction:
    """Predict the run with a change from the record of the first run, and compare with what was measured."""
    before, repeated, truth = (_ttfts(read_record(file).requests) for file in (first, again, changed))
    unchanged, found = (
        {each.request_id: each.ttft_ms for each in predicted(first, each_if)} for each_if in (WhatIf(), what_if)
    )
    ids = [name for name in truth if name in found and name in before]
    errors = [abs(found[name] / truth[name] - 1.0) for name in ids]
    return PastPrediction(
        str(what_if),
        len(ids),
        before_ms=median(before[name] for name in ids),
        predicted_before_ms=median(unchanged[name] for name in ids),
        predicted_ms=median(found[name] for name in ids),
        true_ms=median(truth[name] for name in ids),
        median_error=median(errors),
        p90_error=percentile(errors, 90),
        again_error=median(abs(repeated[name] / before[name] - 1.0) for name in before),
    )


async def measure_round(model: Path, folder: Path, gap_s: float) -> list[PastPrediction]:
    first, again = [await recorded(model, folder, name, WhatIf(), gap_s) for name in ("first", "again")]
    changed = [await recorded(model, folder, f"change-{n}", each, gap_s) for n, each in enumerate(CHANGES)]
    return [compare(first, again, file, each) for file, each in zip(changed, CHANGES, strict=True)]


def _rounds(model: Path, rounds: int, gap_s: float) -> Iterator[PastPrediction]:
    for _ in range(rounds):
        with TemporaryDirectory(prefix="baton-replay-") as folder:
            yield from asyncio.run(measure_round(model, Path(folder), gap_s))


def _ttfts(requests: Sequence[RecordedRequest]) -> dict[str, float]:
    return {each.request_id: each.ttft_ms for each in requests if each.ttft_ms}


def main() -> None:
    gap_s = (0.15, "mean time between two arrivals, in seconds")
    arguments = read_arguments(__doc__, model=(DEMO, "checkpoint"), rounds=3, gap_s=gap_s)
    found = tuple(_rounds(arguments.model, arguments.rounds, arguments.gap_s))
    for each in found:
        print(each)
    print(PastPredictions(found))
    write_result(arguments.json, make_result(MEASURES, [asdict(each) for each in found], None))


if __name__ == "__main__":
    main()
