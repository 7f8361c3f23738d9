"""The routing simulation: bounds, hits, queues, balance, and what the command prints. Traces are made here."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.__main__ import app
from baton.lab.benchmarks.placement import route
from baton.lab.benchmarks.placement.files import Directory, FileOptions, SimulatedFiles
from baton.lab.benchmarks.placement.policies import SglangCacheAware
from baton.lab.benchmarks.placement.route import (
    POLICIES,
    imbalance_of_computed,
    imbalance_of_given,
    make_chooser,
    pictures,
    simulate_all,
)
from baton.lab.benchmarks.placement.simulation import (
    BlockCache,
    Changes,
    PlacementRun,
    PlacementSimulation,
    SimulatedPrompt,
    SimulatedWorkers,
    Speeds,
    WorkerChoice,
    pooled_hit_rate,
)
from baton.lab.benchmarks.placement.traces import TraceArrival, block_ids, read_trace
from baton.lab.benchmarks.router.decision import COLUMNS, as_picture, measure, note
from baton.lab.commands.bench_options import RouteOptions
from baton.lab.report.result import table
from baton.launch import CommandFailed
from baton.text.kv_loading import FIXED_S

TOKENS_PER_S = 512.0  # a block a second
SPEEDS = Speeds(prefill_tokens_per_s=TOKENS_PER_S, token_gap_ms=10.0)


def arrival(at_s: float, *blocks: int) -> TraceArrival:
    return TraceArrival(at_s, 512 * len(blocks), 10, block_ids(blocks))


class ToWorker:
    """Sends everything to one worker."""

    def __init__(self, *workers: int) -> None:
        self._workers = workers

    def choose(self, prompt: SimulatedPrompt, world: SimulatedWorkers) -> WorkerChoice:
        return WorkerChoice(self._workers[prompt.number % len(self._workers)], 0, 0)

    def computed(self, prompt: SimulatedPrompt, changes: Changes) -> None: ...

    def loaded(self, prompt: SimulatedPrompt, changes: Changes) -> None: ...

    def answered(self, prompt: SimulatedPrompt) -> None: ...


def simulated(arrivals: list[TraceArrival], *workers: int, blocks: int = 100) -> PlacementRun:
    return PlacementSimulation(SimulatedWorkers.of(2, blocks, SPEEDS), ToWorker(*workers)).run(arrivals)


def conversations(path: Path) -> Path:
    """Twenty-one of six turns, in Mooncake's format."""
    rows, number = [], 1
    for turn in range(6):
        for each in range(21):
            ids = [0, *range(1000 * each + 1, 1000 * each + 4 + 2 * turn)]
            rows.append({"timestamp": 1000 * number, "input_length": 512 * len(ids), "hash_ids": ids})
            rows[-1] |= {"output_length": 50}
            number += 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_prompts_queue_and_hit_what_earlier_ones_computed() -> None:
    run = simulated([arrival(0, 1, 2, 3), arrival(1, 1, 2, 4)], 0)
    first, second = run.prompts
    assert (first.hit_blocks, first.first_token_s) == (0, 3.0)
    assert (second.hit_blocks, second.started_s, second.first_token_s) == (2, 3.0, 4.0)


def test_blocks_still_computed_by_another_worker_are_no_hit() -> None:
    run = simulated([arrival(0, 1, 2, 3), arrival(1, 1, 2, 3)], 0, 1)
    assert [prompt.hit_blocks for prompt in run.prompts] == [0, 0]


def test_fully_cached_prompt_still_computes_its_last_token() -> None:
    run = simulated([arrival(0, 1), arrival(9, 1)], 0)
    assert run.prompts[1].computed_tokens == 1


def test_ends_of_old_prompts_are_evicted_first() -> None:
    cache = BlockCache(4)
    cache.insert(block_ids([1, 2, 3]))
    assert cache.insert(block_ids([7, 8])) == Changes(list(block_ids([7, 8])), list(block_ids([3])))
    assert cache.hit_blocks(block_ids([1, 2, 3])) == 2


def test_prompt_larger_than_the_cache_leaves_its_beginning_there() -> None:
    cache = BlockCache(3)
    changes = cache.insert(block_ids(range(10)))
    assert cache.hit_blocks(block_ids(range(10))) == 3
    assert len(changes.stored) - len(changes.evicted) == 3


def test_bounds_are_of_one_cache_in_order_of_arrival() -> None:
    trace = [arrival(0, 1, 2), arrival(0, 3, 4), arrival(0, 1, 2)]
    assert pooled_hit_rate(trace, None) == pytest.approx(2 / 6)
    assert pooled_hit_rate(trace, 2) == 0


def test_balance_is_counted_where_prompts_were_sent_and_where_they_were_computed() -> None:
    """Two minutes of work given within the first, all to one of two workers."""
    run = simulated([arrival(0, *range(60)), arrival(1, *range(60, 120))], 0)
    assert imbalance_of_given(run.prompts, 2).p95 == pytest.approx(2.0)
    assert imbalance_of_computed(run.prompts, 2).p50 == pytest.approx(2.0)
    even = simulated([arrival(0, *range(60)), arrival(1, *range(60, 120))], 0, 1)
    assert imbalance_of_given(even.prompts, 2).p95 == pytest.approx(1.0)


def test_sglang_goes_by_its_tree_until_loads_are_apart() -> None:
    world, policy = SimulatedWorkers.of(2, 100, SPEEDS), SglangCacheAware()
    long, other = arrival(0, 1, 2, 3), arrival(0, 9)
    assert policy.prefill(SimulatedPrompt(0, long), world) == 0
    assert policy.prefill(SimulatedPrompt(1, other), world) == 1  # the smaller tree
    assert policy.prefill(SimulatedPrompt(2, long), world) == 0  # all of it matches
    world.prefill[0].requests_in_flight = 65
    assert policy.prefill(SimulatedPrompt(3, long), world) == 1
    world.prefill[1].requests_in_flight = 50
    assert policy.prefill(SimulatedPrompt(4, other), world) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_places_every_prompt_the_same_way_each_time(policy: str, tmp_path: Path) -> None:
    trace = read_trace(conversations(tmp_path / "trace.jsonl"))
    runs = [
        PlacementSimulation(SimulatedWorkers.of(4, 60, Speeds(5000.0)), make_chooser(policy, 4)).run(trace)
        for _ in range(2)
    ]
    placed = [[(prompt.prefill, prompt.decode, prompt.hit_blocks) for prompt in run.prompts] for run in runs]
    assert placed[0] == placed[1]
    assert len(placed[0]) == len(trace)


def test_cache_aware_finds_nearly_all_that_can_be_found_and_keeps_balance(tmp_path: Path) -> None:
    trace = str(conversations(tmp_path / "trace.jsonl"))
    flags = ["bench", "route", "--trace", trace, "--workers", "4", "--blocks-per-worker", "100", "--json"]
    flags += ["--prefill-tokens-per-s", "2000"]
    result = CliRunner().invoke(app, [*flags, "--policy", "cache_aware,round_robin"])
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)["rounds"]
    aware, turns = found["cache_aware"], found["round_robin"]
    assert aware["of_pooled_lru"] > 0.9 > 0.6 > turns["of_pooled_lru"]
    assert aware["imbalance_whole"] < 2.0
    assert aware["ttft_mean_ms"] < turns["ttft_mean_ms"]
    assert {"policy", "hit_rate", "pooled_lru_bound", "infinite_bound", "decision_us_p50"} <= aware.keys()
    single = CliRunner().invoke(app, [*flags, "--policy", "least_tokens"])
    assert list(json.loads(single.stdout)["rounds"][0]) == ["least_tokens"]


def test_unknown_policy_or_trace_is_rejected(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["bench", "route", "--policy", "best"]).exit_code == 2
    assert CliRunner().invoke(app, ["bench", "route", "--shape", "round"]).exit_code == 2
    for text in ("", "nonsense\n", '{"timestamp": 1}\n'):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(CommandFailed):
            read_trace(tmp_path / "bad")


def test_azure_traces_have_lengths_and_share_nothing(tmp_path: Path) -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44"]
    lines.append("2023-11-16 18:15:50.9951690,1396,109")
    (tmp_path / "azure.csv").write_text("\n".join(lines) + "\n")
    first, second = read_trace(tmp_path / "azure.csv")
    assert (first.at_s, first.input_tokens, second.output_tokens) == (0.0, 374, 109)
    assert second.at_s == pytest.approx(4.314579, abs=1e-5)
    assert len(second.blocks) == 3 and not set(first.blocks) & set(second.blocks)


def test_figures_become_a_table_and_pictures(tmp_path: Path) -> None:
    trace = read_trace(conversations(tmp_path / "trace.jsonl"))
    options = RouteOptions(policy="cache_aware,sglang", workers=4, blocks_per_worker=100)
    figures = simulate_all(trace, options, lambda line: None)
    assert "cache_aware" in table(figures, route.COLUMNS)
    assert all(picture.startswith("<svg") for picture in pictures(figures, "made up").values())


def test_decision_cost_is_reported_by_part() -> None:
    costs = [measure(workers, 8192, decisions=20) for workers in (8, 100)]
    assert costs[0].candidates == 16
    assert costs[1].candidates < 100  # not all 200
    assert all(cost.total_us > 0 for cost in costs)
    assert len(table(costs, COLUMNS).splitlines()) == 3
    assert "100 workers" in note(costs)
    assert as_picture(costs).startswith("<svg")


SLOW_FILES = FileOptions(640, workers_per_directory=2, load_gb_per_s=1e-3, known=True)
FILES = replace(SLOW_FILES, load_gb_per_s=1.0)


def with_files(arrivals: list[TraceArrival], *workers: int, files: FileOptions, blocks: int = 100) -> PlacementRun:
    return PlacementSimulation(SimulatedWorkers.of(4, blocks, SPEEDS, files), ToWorker(*workers)).run(arrivals)


def test_evicted_and_neighbours_blocks_are_loaded_and_the_rest_computed() -> None:
    prompts = [arrival(0, 1, 2, 3), arrival(4, 7, 8, 9), arrival(8, 1, 2, 3, 4), arrival(16, 1, 2, 3, 5)]
    run = with_files(prompts, 0, 0, 0, 1, files=FILES, blocks=4)
    assert [(each.hit_blocks, each.loaded_blocks) for each in run.prompts] == [(0, 0), (0, 0), (1, 2), (0, 3)]
    load_s = FIXED_S + 3 * 512 * SPEEDS.kv_bytes_per_token / 1e9
    assert run.prompts[3].first_token_s == pytest.approx(16 + load_s + 1.0)


def test_workers_of_another_directory_and_with_slow_files_compute() -> None:
    prompts = [arrival(0, 1, 2, 3), arrival(4, 1, 2, 3)]
    assert with_files(prompts, 0, 2, files=FILES).prompts[1].loaded_blocks == 0
    assert with_files(prompts, 0, 1, files=FILES).prompts[1].loaded_blocks == 3
    assert with_files(prompts, 0, 1, files=SLOW_FILES).prompts[1].loaded_blocks == 0


def test_full_files_lose_their_oldest_blocks_many_at_a_time() -> None:
    directory = Directory()
    own, other = SimulatedFiles(directory, 128), SimulatedFiles(directory, 128)
    own.write(block_ids(range(1, 129)))
    other.write(block_ids(range(1, 129)))
    own.write(block_ids([500]))
    assert directory.behind(block_ids([500]), 0) == 1
    assert [number for number in range(1, 129) if block_ids([number])[0] not in directory] == [1, 2]


def test_placement_that_knows_of_files_finds_more_with_a_small_cache(tmp_path: Path) -> None:
    trace = str(conversations(tmp_path / "trace.jsonl"))
    flags = ["bench", "route", "--trace", trace, "--workers", "4", "--blocks-per-worker", "20", "--json"]
    flags += ["--prefill-tokens-per-s", "2000", "--file-blocks", "6400", "--workers-per-directory", "2"]
    none, unknown, known = (
        json.loads(CliRunner().invoke(app, [*flags, "--files", files]).stdout)["rounds"][0]["cache_aware"]
        for files in ("none", "unknown", "known")
    )
    assert none["loaded_rate"] == 0.0 < unknown["loaded_rate"]
    assert known["hit_rate"] + known["loaded_rate"] >= unknown["hit_rate"] + unknown["loaded_rate"]
    assert known["ttft_mean_ms"] < none["ttft_mean_ms"]
    assert known["mispredicted"] < unknown["mispredicted"]
