"""`baton bench goodput` against servers without a model: turns, bounds, what is sent, reported and written."""

import asyncio
import json
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.lab.benchmarks.goodput.goodput import GoodputBench, make_workload
from baton.lab.benchmarks.goodput.report import GoodputReport, as_table
from baton.lab.benchmarks.goodput.systems import Launch, SystemUnderTest, systems_of, vllm_settings
from baton.lab.benchmarks.serve.load import Job
from baton.lab.commands.bench_options import GoodputOptions
from baton.launch import CommandFailed
from tests.fixtures.fake_openai import FakeOpenAI, fake_openai

WAIT_S = 20.0
WARM_UP = 6
SERVER = """
import asyncio, os, sys
from pathlib import Path
from tests.fixtures.fake_openai import FakeOpenAI

async def main():
    fake = FakeOpenAI()
    (Path(sys.argv[2]) / str(os.getpid())).touch()
    async with await asyncio.start_server(fake.serve, "127.0.0.1", int(sys.argv[1])) as server:
        await server.serve_forever()

asyncio.run(main())
"""


def options(**flags: Any) -> GoodputOptions:
    settings: dict[str, Any] = {"rates": "200", "requests": 8, "rounds": 1, "saturation": 0, "drain": 5.0}
    return GoodputOptions(mix="0.5*20-30/4-8,0.5*40/2", long_prompt=40, **{**settings, **flags})


def launch(folder: Path) -> Launch:
    return Launch(folder, "float32", folder, (0,))


async def measured(given: GoodputOptions, folder: Path) -> GoodputReport:
    bench = GoodputBench(given, "tiny", systems_of(given, launch(folder)), make_workload(given, 100))
    async with asyncio.timeout(WAIT_S):
        return await bench.run()


async def test_every_system_gets_the_same_requests_in_turn(tmp_path: Path) -> None:
    async with fake_openai() as one, fake_openai() as two:
        targets = [f"one={one.url}", f"two={two.url}"]
        report = await measured(options(target=targets, systems="one,two", rates="100,200", rounds=2), tmp_path)
    assert prompts(one) == prompts(two)
    assert len(prompts(one)) == 2 * 2 * (WARM_UP + 8)
    counts = {name: [len(rounds) for rounds in rates.values()] for name, rates in report.rounds.items()}
    assert counts == {"one": [2, 2], "two": [2, 2]}


async def test_good_answers_are_reported_and_written(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    async with fake_openai() as fake:
        given = options(
            target=[f"one={fake.url}"],
            systems="one",
            saturation=2,
            seconds=0.2,
            json=path,
            tbt_slo_ms=1e6,
            ttft_slo_ms=1e6,
        )
        report = await measured(given, tmp_path)
    written = json.loads(path.read_text())
    assert written["medians"]["one"]["200"]["share_good"] == 1.0
    (only,) = written["rounds"]
    assert only["one"]["rates"]["200"]["answered"] == 8
    assert only["one"]["saturated_tokens_per_s"] > 0
    assert "output tokens/s with 2 requests in flight" in as_table(report)


@pytest.mark.parametrize(("behaviour", "error"), [("silent", "unanswered at the end"), ("short", "tokens instead of")])
async def test_requests_without_a_complete_answer_are_missed(behaviour: str, error: str, tmp_path: Path) -> None:
    given = options(drain=0.2)
    system = SystemUnderTest("one", False, "", lambda: nullcontext(IncompleteTarget(behaviour)))
    async with asyncio.timeout(WAIT_S):
        report = await GoodputBench(given, "tiny", [system], make_workload(given, 100)).run()
    (figures,) = report.rounds["one"][200.0]
    assert (figures.requests, figures.answered, figures.share_good) == (8, 0, 0.0)
    assert error in report.errors["one"][0]


async def test_server_of_a_command_runs_only_during_its_turns(tmp_path: Path) -> None:
    command = f"{sys.executable} -c {shlex.quote(SERVER)} {{port}} {shlex.quote(str(tmp_path))}"
    report = await measured(options(server=[f"own: {command}"], systems="own", rounds=2), tmp_path)
    assert report.failures == {}
    assert [figures.answered for figures in report.rounds["own"][200.0]] == [8, 8]
    pids = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


async def test_failed_system_is_left_out_and_named(tmp_path: Path) -> None:
    async with fake_openai() as good, fake_openai(status="503 Service Unavailable") as broken:
        targets = [f"broken={broken.url}", f"good={good.url}"]
        report = await measured(options(target=targets, systems="broken,good", rounds=2), tmp_path)
    assert list(report.failures) == ["broken"]
    assert len(report.rounds["good"][200.0]) == 2
    assert "broken failed: " in as_table(report)


def test_vllm_settings_are_the_default_and_every_chunk_with_every_number_of_sequences() -> None:
    settings = vllm_settings(options(vllm_chunks="64,512", vllm_seqs="4,256", vllm_flags="--x y"))
    assert settings == {
        "vllm": ("--x", "y"),
        "vllm-c64-s4": ("--x", "y", "--max-num-batched-tokens", "64", "--max-num-seqs", "4"),
        "vllm-c64-s256": ("--x", "y", "--max-num-batched-tokens", "64", "--max-num-seqs", "64"),
        "vllm-c512-s4": ("--x", "y", "--max-num-batched-tokens", "512", "--max-num-seqs", "4"),
        "vllm-c512-s256": ("--x", "y", "--max-num-batched-tokens", "512", "--max-num-seqs", "256"),
    }


def test_vllm_chunk_below_its_default_number_of_sequences_lowers_that_number() -> None:
    settings = vllm_settings(options(vllm_chunks="64,512"))
    assert settings["vllm-c64"] == ("--max-num-batched-tokens", "64", "--max-num-seqs", "64")
    assert settings["vllm-c512"] == ("--max-num-batched-tokens", "512")


def test_unknown_system_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="'nobody' is none of 1p1d, colocated, strict"):
        systems_of(options(systems="nobody", baton=["strict: --x"]), launch(tmp_path))


def test_two_systems_of_one_name_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="two systems are named '1p1d'"):
        systems_of(options(target=["1p1d=http://127.0.0.1:1/v1"]), launch(tmp_path))


@dataclass
class IncompleteTarget:
    """Server that answers the requests of the warm-up, and later ones one token short or never."""

    behaviour: str
    name: str = "incomplete"
    asked: int = 0

    async def prepare(self) -> int | None:
        return None

    async def answer(self, job: Job, on_piece: Callable[[], None]) -> int:
        self.asked += 1
        if self.asked > WARM_UP and self.behaviour == "silent":
            await asyncio.Event().wait()
        on_piece()
        return job.output_tokens - (self.asked > WARM_UP)

    async def close(self) -> None: ...


def prompts(fake: FakeOpenAI) -> list[list[int]]:
    return [asked["prompt"] for asked in fake.asked]
