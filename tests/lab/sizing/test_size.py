"""`baton size`: its load from a trace or a rate, errors that name the flag, and a small complete run."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.__main__ import app
from baton.lab.commands.size_options import SizeOptions
from baton.lab.sizing.costs import BY_BATCH, BY_CONTEXT, BY_PROMPT
from baton.lab.sizing.loads import busiest, drawn, longest_tokens
from baton.lab.sizing.report import as_text, summary
from baton.lab.sizing.search import SearchResult, SizingCandidate, WorkerNumbers
from baton.lab.sizing.trials import TrialFigures
from baton.launch import CommandFailed

SLOS = ["--ttft-slo-ms", "500", "--tbt-slo-ms", "50"]
RATE = ["--rate", "4", "--prompt", "200", "--answer", "8"]


def curves(folder: Path, **other: Any) -> Path:
    points = {BY_BATCH: {1: 10.0, 64: 20.0}, BY_CONTEXT: {64: 10.0, 2048: 11.0}, BY_PROMPT: {64: 64.0, 2048: 2048.0}}
    plain = {
        "model": "some-model",
        "batch_context_tokens": 512,
        "curves": [
            {"name": name, "points": [{"x": x, "measured_ms": ms} for x, ms in of.items()]}
            for name, of in points.items()
        ],
        **other,
    }
    path = folder / "curves.json"
    path.write_text(json.dumps(plain))
    return path


def mooncake(folder: Path, rows: list[tuple[int, int, int, list[int]]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


def size(*arguments: object) -> str:
    """Run it and return its output. Raises: CommandFailed."""
    result = CliRunner().invoke(app, ["size", *map(str, arguments)])
    if isinstance(result.exception, CommandFailed):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.stdout


def test_blocks_of_one_id_have_the_same_tokens_and_all_else_is_a_calls_own(tmp_path: Path) -> None:
    path = mooncake(tmp_path, [(0, 1030, 5, [1, 2]), (10, 1030, 5, [1, 3]), (20, 300, 5, [])])
    [calls] = busiest(path, seeds=1, calls=10, speed=1.0)
    first, second, third = (call.prompt for call in calls)
    assert [len(each) for each in (first, second, third)] == [1030, 1030, 300]
    assert first[:512] == second[:512]
    assert first[512:1024] != second[512:1024]
    assert first[1024:] != second[1024:]
    assert longest_tokens([calls]) == 1035


def test_busiest_stretches_come_first_and_again_where_there_are_fewer_than_seeds(tmp_path: Path) -> None:
    quiet, busy = ([(begin + step * n, 100, 1, []) for n in range(10)] for begin, step in ((0, 1000), (20_000, 10)))
    stretches = busiest(mooncake(tmp_path, [*quiet, *busy]), seeds=3, calls=10, speed=2.0)
    assert [stretch[-1].at_s for stretch in stretches] == [pytest.approx(at_s) for at_s in (0.045, 4.5, 0.045)]
    assert stretches[0][0].at_s == 0.0


def test_drawn_calls_have_the_rate_and_the_lengths_that_were_asked_for() -> None:
    calls = drawn(1, 400, 5.0, 100, 20, 0.5)
    assert calls[-1].at_s == pytest.approx(80.0, rel=0.2)
    assert {50 <= len(call.prompt) <= 150 and 10 <= call.answer_tokens <= 30 for call in calls} == {True}
    assert drawn(1, 400, 5.0, 100, 20, 0.5) == calls != drawn(2, 400, 5.0, 100, 20, 0.5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give --trace, or --rate with --prompt and --answer"),
        (["--rate", "3", "--prompt", "100"], "give --trace, or --rate with --prompt and --answer"),
        ([*RATE, "--trace", "trace.csv"], "give either --trace, or"),
        ([*RATE, "--kv-tokens", "100"], "have 208 tokens, more than --kv-tokens 100"),
        ([*RATE, "--curves", "nowhere.json"], "--curves nowhere.json: No such file"),
        ([*RATE, "--overheads", "nowhere.json"], "--overheads nowhere.json: No such file"),
    ],
)
def test_bad_input_is_refused_by_its_flag(tmp_path: Path, arguments: list[str], said: str) -> None:
    given = arguments if "--curves" in arguments else [*arguments, "--curves", str(curves(tmp_path))]
    with pytest.raises(CommandFailed, match=said):
        size(*SLOS, *given)


def test_file_without_curves_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"curves\.json: no curve is named"):
        size(*SLOS, *RATE, "--curves", curves(tmp_path, curves=[]))


def test_load_of_nearly_one_prefill_worker_needs_two(tmp_path: Path) -> None:
    """Four prompts/s of 0.2 s each keep one worker 80% busy, but queueing makes it miss the SLO of 0.5 s."""
    few = ("--requests", 25, "--seeds", 1, "--jobs", 1, "--curves", curves(tmp_path))
    found = json.loads(size(*SLOS, *RATE, *few, "--json"))
    assert found["taken"] == {"prefill": 2, "decode": 1}
    tried = {(each["prefill"], each["decode"]): each for each in found["candidates"]}
    assert (tried[1, 1]["meets"], tried[2, 1]["meets"]) == (False, True)
    assert 200 < tried[2, 1]["ttft_p50_ms"]["middle"] < 260


def test_table_marks_the_taken_candidate_and_names_interval_and_device() -> None:
    options = SizeOptions(ttft_slo_ms=500.0, tbt_slo_ms=50.0, seeds=2)
    runs = [TrialFigures(10, failed, 123.0 + failed, 1500.0, 9.0, 18.0, 0.99, 1.0, 0.99) for failed in (0, 2)]
    candidate = SizingCandidate(WorkerNumbers(2, 1), tuple(runs))
    made = {"model": "m", "threads": 1, "dtype": "bfloat16", "machine": {"cpu": "a CPU", "date": "2026-11-26"}}
    text = as_text(options, made, SearchResult((candidate,), candidate))
    [row] = [line.split() for line in text.splitlines() if "<-" in line]
    assert row[:7] == ["2P+1D", "<-", "124", "(123-125)", "1,500", "(1,500-1,500)", "9.0"]
    assert "2P+1D is the cheapest that meets TTFT 500 ms and TBT 50 ms for 95% of requests" in text
    assert "median of 2 seeds and their range, each of 200 requests" in text
    assert "step costs: m on a CPU, 1 threads, bfloat16, 2026-11-26" in text
    assert "no cluster meets TTFT 500 ms" in as_text(options, made, SearchResult((candidate,), None))
    assert summary(candidate) == "2P+1D: 99.0% (99.0%-99.0%) in SLO; 2 refused or failed"
