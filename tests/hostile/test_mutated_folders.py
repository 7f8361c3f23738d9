"""Model and adapter folders with seeded faults: each loads, or is refused with a message that names it."""

import itertools
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from baton.protos import sampling_pb2, session_pb2
from baton.versions import OWN
from baton.worker.transfer.wire import versions_message
from tests.fixtures.adapters import greedy, make_adapter, merged_model
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.mutated_folders import mutate
from tests.fixtures.poolers import pooling_config, write_modules
from tests.fixtures.real_workers import real_pair
from tests.fixtures.session_client import SessionClient, eventually
from tests.fixtures.tools import ROOT

TINY: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "num_attention_heads": 2}
GROWTH_BYTES = 64 << 20
START_S = 240  # to import torch and transformers on a busy machine


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("bases")
    llama = make_checkpoint(folder / "llama", "llama", vocab_size=300, **TINY)
    qwen3 = make_checkpoint(folder / "qwen3", "qwen3", vocab_size=300, **TINY)
    write_modules(qwen3, pooling_config("lasttoken"), normalises=True)
    adapter = make_adapter(
        folder / "adapter", llama, 1, rank=2, targets=("q_proj", "down_proj"), rank_pattern={"q_proj": 3}
    )
    mixtral = make_checkpoint(folder / "mixtral", "mixtral", vocab_size=300, **{**TINY, "num_local_experts": 2})
    return [llama, adapter, qwen3, adapter, mixtral]


def test_mutated_folders_load_or_are_refused_by_name(bases: list[Path], hostile_s: float) -> None:
    command = [sys.executable, "-m", "tests.fixtures.mutated_folders", str(hostile_s), "0", *map(str, bases)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=hostile_s + START_S, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["wrong"] == {}
    assert result["found"]["loaded"] > 0
    assert result["found"]["refused"] > 0
    assert result["grew_bytes"] < GROWTH_BYTES


PROMPT, TOKENS = [*range(5, 25)], 300
LEAST_FOLDERS = 40


async def prepare(client: SessionClient, change_id: int, folder: Path) -> session_pb2.AdapterPrepared:
    """Ask the worker to load an adapter, return its answer, and unload the adapter again."""
    await client.send(prepare_adapter=session_pb2.PrepareAdapter(change_id=change_id, name="mutated", path=str(folder)))

    def answers() -> list[Any]:
        return [each for each in client.of_kind("adapter_prepared") if each.change_id == change_id]

    found: session_pb2.AdapterPrepared = (await eventually(answers))[0]
    await client.send(prepare_adapter=session_pb2.PrepareAdapter(change_id=change_id, drop=True))
    return found


async def test_mutated_adapters_change_no_running_answer_or_worker(
    bases: list[Path], tmp_path: Path, hostile_s: float
) -> None:
    model, adapter = bases[0], bases[1]
    wanted = greedy(merged_model(model, None), PROMPT, TOKENS)
    async with real_pair(model) as pair:
        client = pair.to_decode
        await client.disconnect()
        client.versions = versions_message(OWN)
        await client.connect()
        sampling = sampling_pb2.Sampling(max_tokens=TOKENS, n=1, top_p=1.0)
        await client.send(
            start=session_pb2.Start(
                attempt_id=1, transfer_id=b"1" * 16, token_ids=PROMPT, sampling=sampling, time_left_ms=600_000
            )
        )
        ends, refused = time.monotonic() + hostile_s, 0
        for seed in itertools.count():
            if seed >= LEAST_FOLDERS and time.monotonic() > ends:
                break
            folder = tmp_path / f"adapter-{seed}"
            shutil.copytree(adapter, folder)
            changes = mutate(folder, random.Random(seed))
            prepared = await prepare(client, seed + 1, folder)
            refused += bool(prepared.refusal)
            assert prepared.digest or folder.name in prepared.refusal or "mutated" in prepared.refusal, changes
            shutil.rmtree(folder)
        assert 0 < refused < seed
        await eventually(lambda: len([t for each in client.outputs(1) for t in each.token_ids]) == TOKENS - 1)
        later = [token_id for output in client.outputs(1) for token_id in output.token_ids]
        assert [*(await client.one("first_step", 1)).outputs[0].token_ids, *later] == wanted
        await eventually(lambda: not pair.decode._host.adapter_table.adapters)
        assert (await prepare(client, 1 << 20, adapter)).digest
