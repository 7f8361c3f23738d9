"""1P+1D on one GPU: real worker processes, KV through CUDA's inter-process handles, no Redis."""

import tempfile
from pathlib import Path

import torch

from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import unlikely
from tests.gpu.device import CUDA, needs_gpu

pytestmark = needs_gpu
TOKENS = 24


def test_answer_is_that_of_transformers_and_its_kv_came_by_cuda_ipc() -> None:
    from transformers import AutoModelForCausalLM

    from baton.lab.benchmarks.gpu.row import Setting
    from baton.lab.benchmarks.gpu.workers import WorkerPair, with_workers

    async def measure(workers: WorkerPair) -> list[tuple[list[int], list[int], object]]:
        found = []
        for length in (1, 33, 700):
            asked = await workers.answer(length, TOKENS)
            found.append((asked.prompt, asked.token_ids, asked.landed))
        return found

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder), "llama")
        theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        setting = Setting(CUDA, dry=False)
        for prompt, answer, landed in with_workers(
            setting, ("decode", "prefill"), measure, checkpoint, dtype="float32"
        ):
            assert len(answer) == TOKENS
            assert unlikely(theirs, prompt, answer) == []
            assert landed.transport == "cuda_ipc"
