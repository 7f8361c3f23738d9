"""Row `one_gpu`: time between tokens alone, and next to prompts that saturate the prefill worker."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from baton.lab.benchmarks.gpu import workers
from baton.lab.benchmarks.gpu.row import Setting
from baton.lab.benchmarks.transfer.worker_pair import BLOCK_TOKENS

QUIET_S, SATURATED_S = 0.010, 0.011


class ImitatedWorkers:
    """Workers whose tokens come slower while prompts are computed."""

    def __init__(self) -> None:
        self.in_flight = self.most = 0

    async def answer(self, tokens: int, answer_tokens: int) -> Any:
        is_prompt = tokens != BLOCK_TOKENS
        self.in_flight += is_prompt
        self.most = max(self.most, self.in_flight)
        busy = False
        for _ in range(answer_tokens):
            await asyncio.sleep(0)
            busy |= self.in_flight > 0
        self.in_flight -= is_prompt
        times = [place * (SATURATED_S if busy else QUIET_S) for place in range(answer_tokens)]
        return SimpleNamespace(times=times, landed=SimpleNamespace(transport="cuda_ipc"))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[tuple[str, ...], dict[str, Any], ImitatedWorkers]]]:
    made = []

    def with_workers(
        setting: Setting, roles: tuple[str, ...], measure: Callable[[Any], Awaitable[Any]], model: Path, **others: Any
    ) -> Any:
        made.append((roles, others, ImitatedWorkers()))
        return asyncio.run(measure(made[-1][2]))  # type: ignore[arg-type]

    monkeypatch.setattr(workers, "with_workers", with_workers)
    monkeypatch.setattr(workers, "write_checkpoint", lambda folder, *_: folder)
    yield made


@pytest.mark.parametrize("has_mps", [False, True])
def test_one_gpu_is_saturated_over_quiet(
    has_mps: bool, started: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if has_mps:
        (tmp_path / "control").touch()
    ratio, took, beside = workers.one_gpu(Setting(torch.device("cpu"), dry=False))
    assert ratio.value == pytest.approx(SATURATED_S / QUIET_S)
    assert took.value == pytest.approx(SATURATED_S * 1e3)
    assert beside.value == pytest.approx(1)
    assert ratio.limit.startswith("MPS, prefill 75 %" if has_mps else "no MPS")
    (apart, others, imitated), _ = started
    assert apart == ("decode", "prefill")
    assert others["environments"] == {"prefill": {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "75"}}
    assert imitated.most == 4


def test_each_worker_has_the_environment_of_its_role(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, dict[str, str]] = {}

    @contextmanager
    def worker_process(role: str, *_: object, environment: dict[str, str], stop_s: float) -> Iterator[None]:
        seen[role] = environment
        if len(seen) == 2:
            raise RuntimeError("that is all")
        yield

    monkeypatch.setattr(workers, "worker_process", worker_process)
    setting = Setting(torch.device("cpu"), dry=True)
    with pytest.raises(RuntimeError, match="that is all"):
        workers.with_workers(setting, ("decode", "prefill"), Mock(), tmp_path, environments={"prefill": {"A": "1"}})
    assert seen == {"decode": {}, "prefill": {"A": "1"}}
