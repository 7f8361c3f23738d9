"""Command `baton bench goodput`: share of requests that meet two objectives, for Baton and its peers in turn.

In each round, all systems get the same requests at each rate, one after another. Each measurement restarts its system.
"""

import asyncio
import gc
import itertools
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from baton.lab.benchmarks.goodput.figures import (
    GoodputFigures,
    figures_of,
    first_errors,
    mean_output_tokens,
    saturated_tokens_per_s,
)
from baton.lab.benchmarks.goodput.report import GoodputReport, as_result, as_table, figure_text, pictures_of
from baton.lab.benchmarks.goodput.systems import Launch, SystemUnderTest, systems_of, usable_cores, vocab_size_of
from baton.lab.benchmarks.goodput.workload import Workload, mix_workload, read_mix, trace_workload
from baton.lab.benchmarks.placement.traces import read_trace
from baton.lab.benchmarks.serve.load import Answer, Job, LoadRun, ServiceLoad, Target, TargetFailed
from baton.lab.commands.bench_options import GoodputOptions
from baton.lab.report.result import write_pictures, write_result
from baton.launch import CommandFailed
from baton.launch.model_source import find_model
from baton.launch.paths import ROOT
from baton.process.objectives import LatencyObjectives

WARM_UP_REQUESTS, WARM_UP_IN_FLIGHT, WARM_UP_S = 6, 2, 300.0
UNANSWERED = "unanswered at the end"
SAMPLED_REQUESTS = 1000  # number of requests over which the mean answer length is computed


def run_goodput_bench(options: GoodputOptions) -> int:
    """Run the benchmark, print it and write its files; return 1 if a system failed. Raises: CommandFailed."""
    with tempfile.TemporaryDirectory(prefix="baton-goodput-") as scratch:
        source = find_model(options.model, ROOT, Path(scratch))
        systems = systems_of(options, Launch(source.folder, options.dtype, Path(scratch), usable_cores()))
        workload = make_workload(options, vocab_size_of(source.folder))
        report = asyncio.run(GoodputBench(options, source.name, systems, workload).run())
    print(as_table(report))
    write_pictures(options.pictures, pictures_of(report))
    return 1 if report.failures else 0


def make_workload(options: GoodputOptions, vocab_size: int) -> Workload:
    """Return the workload of the flags. Raises: CommandFailed."""
    if options.trace is not None:
        return trace_workload(read_trace(options.trace), vocab_size, options.max_prompt, options.max_answer)
    try:
        return mix_workload(read_mix(options.mix), vocab_size)
    except ValueError as error:
        raise CommandFailed(f"--mix: {error}") from error


class GoodputBench:
    """Rounds of all systems at all rates. A system that fails is left out from then on."""

    def __init__(
        self, options: GoodputOptions, model: str, systems: Sequence[SystemUnderTest], workload: Workload
    ) -> None:
        self._options, self._model, self._systems, self._workload = options, model, systems, workload
        self._objectives = LatencyObjectives(options.ttft_slo_ms, options.tbt_slo_ms)
        self._rounds: dict[str, dict[float, list[GoodputFigures]]] = {each.name: {} for each in systems}
        self._saturated: dict[str, list[float]] = defaultdict(list)
        self._errors: dict[str, list[str]] = defaultdict(list)
        self._failures: dict[str, str] = {}

    async def run(self) -> GoodputReport:
        """Measure everything and return the report. The result file is written after each measurement of a system."""
        for number in range(self._options.rounds):
            for rate in self._options.rate_values:
                await self._turns(number, f"{rate:g}/s", self._at_rate(rate, number))
            if self._options.saturation:
                await self._turns(number, "saturation", self._in_closed_loop(number))
        return self._report()

    async def _turns(
        self, number: int, load: str, measure: Callable[[SystemUnderTest, Target], Awaitable[str]]
    ) -> None:
        """Measure each system once. Every second round has the reverse order, so that a drift affects all equally."""
        for system in reversed(self._systems) if number % 2 else self._systems:
            if system.name in self._failures:
                continue
            try:
                async with system.serving() as target:
                    await self._warm_up(target)
                    found = await measure(system, target)
            except CommandFailed as error:
                self._failures[system.name] = found = str(error)
            print(f"round {number + 1}/{self._options.rounds}, {load}, {system.name}: {found}", file=sys.stderr)
            write_result(self._options.json, as_result(self._report()))

    def _at_rate(self, rate: float, number: int) -> Callable[[SystemUnderTest, Target], Awaitable[str]]:
        options = self._options
        count = options.requests or max(1, round(rate * options.seconds))
        jobs = self._workload(rate, count, f"{options.seed}/{number}/{rate:g}")

        async def measure(system: SystemUnderTest, target: Target) -> str:
            run = await _timed(ServiceLoad(_bounded(target.answer, jobs[-1].arrival_s + options.drain)).open_loop(jobs))
            figures = figures_of(run, self._objectives, options.long_prompt)
            self._rounds[system.name].setdefault(rate, []).append(figures)
            self._errors[system.name] += first_errors(run)
            return figure_text(figures)

        return measure

    def _in_closed_loop(self, number: int) -> Callable[[SystemUnderTest, Target], Awaitable[str]]:
        options = self._options

        async def measure(system: SystemUnderTest, target: Target) -> str:
            answer = _bounded(target.answer, options.seconds + options.drain)
            jobs = self._endless(f"{options.seed}/{number}/saturation")
            run = await _timed(ServiceLoad(answer).closed_loop(jobs, options.saturation, options.seconds))
            tokens_per_s = saturated_tokens_per_s(run, options.seconds)
            self._saturated[system.name].append(tokens_per_s)
            self._errors[system.name] += first_errors(run)
            return f"{tokens_per_s:.1f} output tokens/s"

        return measure

    def _endless(self, seed: str) -> Iterator[Job]:
        """Yield requests without end."""
        for part in itertools.count():
            yield from self._workload(math.inf, max(WARM_UP_REQUESTS, self._options.saturation), f"{seed}/{part}")

    async def _warm_up(self, target: Target) -> None:
        """Let a fresh server compute a few requests. Raises: CommandFailed if one fails."""
        jobs = itertools.islice(self._endless("warm-up"), WARM_UP_REQUESTS)
        run = await ServiceLoad(_bounded(target.answer, WARM_UP_S)).closed_loop(jobs, WARM_UP_IN_FLIGHT)
        if errors := first_errors(run):
            raise CommandFailed(f"a request failed before the measurement: {errors[0]}")

    def _report(self) -> GoodputReport:
        options = self._options
        return GoodputReport(
            model=self._model,
            dtype=options.dtype,
            objectives=self._objectives,
            load=options.trace.name if options.trace else options.mix,
            duration=f"{options.seconds:g} s" if options.requests is None else f"{options.requests} requests",
            seed=options.seed,
            in_flight_at_saturation=options.saturation,
            tokens_per_request=mean_output_tokens(list(itertools.islice(self._endless("mean"), SAMPLED_REQUESTS))),
            settings={each.name: each.setting for each in self._systems},
            batons=tuple(each.name for each in self._systems if each.is_baton),
            rounds=self._rounds,
            saturated=self._saturated,
            errors={name: tuple(dict.fromkeys(errors)) for name, errors in self._errors.items() if errors},
            failures=self._failures,
        )


def _bounded(answer: Answer, seconds: float) -> Answer:
    """Return an answer function that cancels requests `seconds` from now, and rejects answers of a wrong length."""
    deadline = asyncio.get_running_loop().time() + seconds

    async def bounded(job: Job, on_piece: Callable[[], None]) -> int:
        try:
            async with asyncio.timeout_at(deadline):
                tokens = await answer(job, on_piece)
        except TimeoutError as error:
            raise TargetFailed(UNANSWERED, "DEADLINE_EXCEEDED") from error
        if tokens != job.output_tokens:
            raise TargetFailed(f"the answer has {tokens} tokens instead of {job.output_tokens}")
        return tokens

    return bounded


async def _timed(run: Awaitable[LoadRun]) -> LoadRun:
    """Await a run without garbage collections, which would delay the client."""
    gc.collect()
    gc.disable()
    try:
        return await run
    finally:
        gc.enable()
