"""Command `baton bench scale`: thousands of workers behind one router, and three failures that others reported.

`workers` measures a router's memory and CPU by number of simulated workers, and requests with long prompts that extend
known ones. `faults` sends requests while simulated workers die and hang (ai-dynamo/dynamo#13088: 36 of 1 536 requests
never ended). `window` sends 32 real requests over 4 batch slots (TokenSpeed #1427: they hung). `long` sends one prompt
of 200 000 tokens beside answers of a tiny real model (FreeToken #484: they fell from 59 to 8 tokens/s).
"""

import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.lab.benchmarks.scale.experiments import FaultFigures, FaultShape, FleetCost, fleet_cost, survive_faults
from baton.lab.benchmarks.scale.real import LongPromptFigures, WindowFigures, beside_long_prompt, over_window
from baton.lab.commands.bench_options import ScaleOptions
from baton.lab.harness.processes import tiny_model
from baton.lab.report.result import SERVICE, Columns, Promise, Result, make_result, table

KEPT_SHARE = 0.5
"""Least part of their rate that answers beside a long prompt must keep."""


@dataclass(frozen=True, slots=True)
class ScaleReport:
    """Figures of the parts that were measured."""

    costs: tuple[FleetCost, ...] = ()
    faults: FaultFigures | None = None
    window: WindowFigures | None = None
    long: tuple[LongPromptFigures, ...] = ()

    @property
    def promises(self) -> dict[str, bool]:
        """Whether each promise was kept, by promise."""
        kept = {
            f"{cost.workers} workers: every request was answered": not (cost.ids.failed or cost.chat.failed)
            for cost in self.costs
        }
        if self.faults is not None:
            kept["faults: every request was answered"] = self.faults.answered == self.faults.requests
        if self.window is not None:
            kept["window: every request was answered"] = not self.window.failed
        for each in self.long:
            name = "colocated" if each.colocated else "1P+1D"
            prompt = f"{each.prompt_tokens} tokens, {name}"
            kept[f"{prompt}: the prompt is answered before its deadline"] = each.answered
            keeps_rate = each.during_tokens_per_s >= KEPT_SHARE * each.before_tokens_per_s
            kept[f"{prompt}: answers keep {KEPT_SHARE:.0%} of their rate"] = keeps_rate
        return kept

    def as_json(self) -> Result:
        figures = {
            **{
                f"workers_{cost.workers}": {**asdict(cost), "on_16_cores_per_s": cost.on_cores(16)}
                for cost in self.costs
            },
            **({} if self.faults is None else {"faults": asdict(self.faults)}),
            **({} if self.window is None else {"window": asdict(self.window)}),
            **{f"long_{'colocated' if each.colocated else '1p1d'}": asdict(each) for each in self.long},
        }
        kept = list(self.promises.values())
        verdict = Promise("requests end, answers keep their rate", sum(kept), len(kept) - sum(kept), "promises")
        return make_result([*SERVICE, "process", "lab/benchmarks/scale"], [figures], verdict)


def run_scale_bench(options: ScaleOptions) -> int:
    """Run the parts and print them; return 1 if a promise was broken. Raises: CommandFailed."""
    with tiny_model() as folder:
        report = asyncio.run(_measure(options, folder))
    print(json.dumps(report.as_json(), indent=2) if options.json else "\n\n".join(as_text(report)))
    return int(not all(report.promises.values()))


async def _measure(options: ScaleOptions, folder: Path) -> ScaleReport:
    parts = options.parts
    costs = []
    for workers in options.worker_counts if "workers" in parts else ():
        _say(f"{workers} workers")
        costs.append(await fleet_cost(folder, workers, options.prompt_tokens, options.seconds))
        _say(table(costs[-1:], COSTS))
    _say("faults, and more requests than batch slots")
    faults = await survive_faults(folder, FaultShape(requests=options.requests)) if "faults" in parts else None
    window = await over_window(folder) if "window" in parts else None
    long = []
    for colocated in (False, True) if "long" in parts else ():
        _say(f"a prompt of {options.long_prompt_tokens:,} tokens, {'colocated' if colocated else '1P+1D'}")
        long.append(await beside_long_prompt(folder, options.long_prompt_tokens, colocated))
    return ScaleReport(tuple(costs), faults, window, tuple(long))


def _say(text: str) -> None:
    """Write progress, since all parts together take half an hour."""
    print(text, file=sys.stderr, flush=True)


COSTS: Columns[FleetCost] = {
    "workers": lambda cost: f"{cost.workers:,}",
    "ready s": lambda cost: f"{cost.ready_s:.1f}",
    "MiB": lambda cost: f"{cost.rss_mib:.0f}",
    "idle cores": lambda cost: f"{cost.idle_cpu_share:.3f}",
    "us/worker/s": lambda cost: f"{cost.cpu_us_per_worker_s:.0f}",
    "decision us": lambda cost: f"{cost.decision_us:.0f}",
    "ids: CPU ms": lambda cost: f"{cost.ids.cpu_ms_per_request:.1f}",
    "/s/core": lambda cost: f"{cost.ids.requests_per_s_per_core:.0f}",
    "p99 ms": lambda cost: f"{cost.ids.latency_p99_ms:.0f}",
    "chat: CPU ms": lambda cost: f"{cost.chat.cpu_ms_per_request:.1f}",
    "/s/core ": lambda cost: f"{cost.chat.requests_per_s_per_core:.0f}",
    "p99 ms ": lambda cost: f"{cost.chat.latency_p99_ms:.0f}",
}
LONG: Columns[LongPromptFigures] = {
    "long prompt": lambda each: "colocated" if each.colocated else "1P+1D",
    "tokens": lambda each: f"{each.prompt_tokens:,}",
    "first token s": lambda each: f"{each.first_token_s:.1f}",
    "tokens/s before": lambda each: f"{each.before_tokens_per_s:.0f}",
    "during": lambda each: f"{each.during_tokens_per_s:.0f}",
    "p99 ms before": lambda each: f"{each.before_p99_ms:.2f}",
    "p99 during": lambda each: f"{each.during_p99_ms:.2f}",
}


def as_text(report: ScaleReport) -> list[str]:
    parts = []
    if report.costs:
        parts.append(table(report.costs, COSTS))
    if (faults := report.faults) is not None:
        parts.append(
            f"faults: {faults.prefill_workers} + {faults.decode_workers} workers, {faults.killed_workers} killed, "
            f"{faults.stopped_workers} stopped; of {faults.requests} requests {faults.answered} answered, "
            f"{faults.failed} failed, {faults.never_ended} never ended; p50 {faults.latency_p50_ms:.0f} ms, "
            f"p99 {faults.latency_p99_ms:.0f} ms, longest {faults.longest_ms:.0f} ms {dict(faults.errors) or ''}"
        )
    if (window := report.window) is not None:
        parts.append(
            f"window: {window.requests} requests over {window.slots} batch slots: {window.answered} answered, "
            f"{window.failed} failed; p50 {window.latency_p50_ms:.0f} ms, longest {window.longest_ms:.0f} ms"
        )
    if report.long:
        parts.append(table(report.long, LONG))
    parts.append("\n".join(f"{'kept  ' if kept else 'BROKEN'} {text}" for text, kept in report.promises.items()))
    return parts
