"""Command `baton size`: simulates clusters of different sizes under a load; recommends the cheapest within the SLOs."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from baton.lab.commands.bench_options import CurvesOptions
from baton.lab.commands.size_options import SizeOptions
from baton.lab.sizing.cluster import ClusterShape
from baton.lab.sizing.costs import CurvesError, MeasuredCosts, Overheads, read_costs
from baton.lab.sizing.loads import Stretch, busiest, drawn, longest_tokens
from baton.lab.sizing.report import as_json, as_text, summary
from baton.lab.sizing.search import Prices, Search, SearchResult, SizingCandidate, WorkerNumbers, lower_bound
from baton.lab.sizing.trials import Crew, SizingTargets, Trial, TrialFailed, crew
from baton.launch import CommandFailed


def run_size(options: SizeOptions) -> int:
    """Search for the cheapest cluster and print it; return 1 if no candidate meets the SLOs. Raises: CommandFailed."""
    stretches = _stretches(options)
    shape = _shape(options, stretches)
    curves = _curves(options)
    try:
        costs = read_costs(curves)
        overheads = _overheads(options)
    except CurvesError as error:
        raise CommandFailed(f"{options.curves or 'the measured curves'}: {error}") from error
    with (
        tqdm(unit=" requests", file=sys.stderr, disable=not sys.stderr.isatty()) as bar,
        # several threads call `update` without a lock: the progress bar may miss a count
        crew(options.jobs, bar.update) as simulations,
    ):
        sizing = _Sizing(options, shape, curves, overheads, stretches, simulations)
        try:
            found = sizing.search(_start(options, costs, stretches))
        except TrialFailed as error:
            raise CommandFailed(str(error)) from error
    print(json.dumps(as_json(options, curves, found)) if options.json else as_text(options, curves, found))
    return 0 if found.taken is not None else 1


@dataclass
class _Sizing:
    options: SizeOptions
    shape: ClusterShape
    curves: Mapping[str, Any]
    overheads: Overheads
    stretches: Sequence[Stretch]
    simulations: Crew

    def search(self, start: WorkerNumbers) -> SearchResult:
        options = self.options
        prices = Prices(options.prefill_price, options.decode_price)
        return Search(self._evaluate, options.share, options.most_workers, prices).run(start)

    def _evaluate(self, workers: WorkerNumbers) -> SizingCandidate:
        """Simulate a candidate with every seed. Raises: TrialFailed."""
        options = self.options
        cluster = replace(self.shape, prefill=workers.prefill, decode=workers.decode)
        targets = SizingTargets(options.ttft_slo_ms, options.tbt_slo_ms)
        trials = [
            Trial(cluster, self.curves, self.overheads, calls, targets, seed)
            for seed, calls in enumerate(self.stretches)
        ]
        candidate = SizingCandidate(workers, tuple(self.simulations.run(trials)))
        tqdm.write(summary(candidate), file=sys.stderr)
        return candidate


def _stretches(options: SizeOptions) -> list[Stretch]:
    """Return the load of each seed: a stretch of calls. Raises: CommandFailed."""
    by_rate = (options.rate, options.prompt, options.answer)
    if options.trace is not None:
        if any(each is not None for each in by_rate):
            raise CommandFailed("give either --trace, or --rate with --prompt and --answer")
        return busiest(options.trace, options.seeds, options.requests, options.speed)
    rate, prompt, answer = by_rate
    if rate is None or prompt is None or answer is None:
        raise CommandFailed("no load: give --trace, or --rate with --prompt and --answer")
    return [drawn(seed, options.requests, rate, prompt, answer, options.range_ratio) for seed in range(options.seeds)]


def _shape(options: SizeOptions, stretches: Sequence[Stretch]) -> ClusterShape:
    """Return the cluster's shape with one worker of each role. Raises: CommandFailed."""
    longest = longest_tokens(stretches)
    if longest > options.kv_tokens:
        raise CommandFailed(
            f"a request and its answer have {longest} tokens, more than --kv-tokens {options.kv_tokens}: increase it"
        )
    return ClusterShape(
        1, 1, kv_tokens=options.kv_tokens, context_tokens=longest + 1, max_sequences=options.max_sequences
    )


def _start(options: SizeOptions, costs: MeasuredCosts, stretches: Sequence[Stretch]) -> WorkerNumbers:
    """Return the least numbers of workers for the busiest seed: for all answer tokens and half of the prompt tokens.

    The other half of the prompt tokens may be cached.
    """
    sequences = range(1, options.max_sequences + 1)
    best = max((n / costs.decode_step_s(n) for n in sequences if _in_time(costs, n, options)), default=1.0)
    prompts, answers = (
        max(sum(map(count, calls)) / max(1e-3, calls[-1].at_s) for calls in stretches)
        for count in (lambda call: len(call.prompt), lambda call: call.answer_tokens)
    )
    workers = WorkerNumbers(lower_bound(prompts / 2, costs.prefill_tokens_per_s), lower_bound(answers, best))
    return workers if sum(workers) <= options.most_workers else WorkerNumbers(1, 1)


def _in_time(costs: MeasuredCosts, sequences: int, options: SizeOptions) -> bool:
    return 1e3 * costs.decode_step_s(sequences) <= options.tbt_slo_ms


def _curves(options: SizeOptions) -> Mapping[str, Any]:
    """Read or measure the curves. Raises: CommandFailed."""
    if options.curves is None:
        return _measured(options)
    try:
        plain = json.loads(options.curves.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandFailed(f"--curves {options.curves}: {error.strerror}") from error
    except ValueError as error:
        raise CommandFailed(f"--curves {options.curves} is not JSON: {error}") from error
    if not isinstance(plain, dict):
        raise CommandFailed(f"--curves {options.curves}: a JSON object is expected, as `baton bench curves` writes it")
    return plain


def _measured(options: SizeOptions) -> Mapping[str, Any]:
    """Measure the curves. Raises: CommandFailed."""
    from baton.lab.benchmarks.engine.curves import curves_report

    asked = CurvesOptions(
        model=options.model, threads=options.threads, batch="1,2,4,8,16,32", lengths="64,128,256,512,1024,2048"
    )
    return curves_report(asked, lambda line: print(line, file=sys.stderr, flush=True)).report


def _overheads(options: SizeOptions) -> Overheads:
    """Read the overheads. Raises: CommandFailed."""
    known = Overheads()
    if options.overheads is not None:
        try:
            known = Overheads(**json.loads(options.overheads.read_text(encoding="utf-8"))["overheads"])
        except OSError as error:
            raise CommandFailed(f"--overheads {options.overheads}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise CommandFailed(f"--overheads {options.overheads}: {error!r}") from error
    if options.kv_bytes_per_token is not None:
        known = replace(known, kv_bytes_per_token=options.kv_bytes_per_token)
    if options.link_gb_per_s is not None:
        known = replace(known, kv_bytes_per_s=1e9 * options.link_gb_per_s)
    return known
