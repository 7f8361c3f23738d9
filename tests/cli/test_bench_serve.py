"""`baton bench serve` against a server without a model: open and closed loops, failures, what is sent and printed."""

import asyncio
import json
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.__main__ import app
from baton.lab.benchmarks.serve.serve import as_table, measure_all
from baton.lab.commands.bench_options import ServeBenchOptions
from baton.launch import CommandFailed
from tests.fixtures.fake_openai import FakeOpenAI, fake_openai
from tests.fixtures.waiting import eventually

WAIT_S = 20.0


def options(fake: FakeOpenAI, requests: int = 6, **arrivals: Any) -> ServeBenchOptions:
    return ServeBenchOptions(
        target=[fake.url], api_key="key", timeout=WAIT_S, input_len=20, output_len=5, requests=requests,
        goodput=["ttft:1e6"], **arrivals,
    )  # fmt: skip


async def test_open_loop_sends_while_every_earlier_answer_is_outstanding() -> None:
    async with fake_openai(hold_until=1 + 6) as slow, asyncio.timeout(WAIT_S):
        (metrics,) = await measure_all(options(slow, rate=500.0))
    assert (metrics.completed, metrics.failed) == (6, 0)


async def test_closed_loop_never_has_more_than_its_concurrency_outstanding() -> None:
    async with fake_openai(hold_until=1 + 3) as slow:
        running = asyncio.create_task(measure_all(options(slow, concurrency=2)))
        await eventually(lambda: len(slow.asked) >= 1 + 2)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(slow.asked) == 1 + 2
        slow._enough.set()
        (metrics,) = await running
    assert metrics.completed == 6


async def test_tokens_are_counted_by_the_servers_usage_and_pieces_by_the_clock() -> None:
    async with fake_openai() as fake:
        (metrics,) = await measure_all(options(fake, rate=float("inf")))
    assert metrics.total_output_tokens == 6 * 5
    assert metrics.total_input_tokens == 6 * 20
    assert metrics.ttft.mean > 0
    assert metrics.request_goodput == metrics.request_throughput


async def test_requests_are_greedy_token_ids_of_the_first_model_and_go_past_the_end() -> None:
    async with fake_openai() as fake:
        await measure_all(options(fake, requests=1, concurrency=1))
    sent = fake.asked[-1]
    assert sent["model"] == "fake-model"
    assert len(sent["prompt"]) == 20
    assert all(isinstance(token, int) for token in sent["prompt"])
    assert (sent["max_tokens"], sent["temperature"], sent["ignore_eos"], sent["stream"]) == (5, 0.0, True, True)


async def test_failed_requests_are_counted_and_their_errors_shown() -> None:
    async with fake_openai() as fake:
        original = fake._answer

        async def break_after_the_warm_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            fake.status = "200 OK" if not fake.asked else "503 Service Unavailable"
            await original(reader, writer)

        fake._answer = break_after_the_warm_up  # type: ignore[method-assign]
        (metrics,) = await measure_all(options(fake, concurrency=1))
    assert (metrics.completed, metrics.failed) == (0, 6)
    assert "503" in as_table(metrics)


async def test_missing_server_ends_the_command() -> None:
    with pytest.raises(CommandFailed, match="does not answer"):
        await measure_all(ServeBenchOptions(target=["http://127.0.0.1:1/v1"], model=["m"], concurrency=1))


@pytest.mark.parametrize(
    "flags", [[], ["--rate", "1", "--concurrency", "2"], ["--rate", "0"], ["--rate", "1", "--goodput", "ttft"]]
)
def test_flags_that_contradict_each_other_are_refused(flags: list[str]) -> None:
    assert CliRunner().invoke(app, ["bench", "serve", *flags]).exit_code == 2


def test_invalid_target_is_rejected() -> None:
    result = CliRunner().invoke(app, ["bench", "serve", "--rate", "1", "--target", "localhost:1"])
    assert isinstance(result.exception, CommandFailed)


async def test_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rate", "inf", "--requests", "2", "--input-len", "4", "--output-len", "2", "--json"]
    async with fake_openai() as fake:
        command = ["bench", "serve", "--target", fake.url, *flags, "--goodput", "ttft:1e6", "tpot:1e6"]
        result = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert result.exit_code == 0, result.output
    (printed,) = json.loads(result.stdout)["rounds"][0].values()
    assert printed["completed"] == 2
    assert printed["request_goodput"] > 0
