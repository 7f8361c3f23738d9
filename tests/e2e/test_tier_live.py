"""On a stack with a disk tier, KV is found again after all workers were killed and restarted."""

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.client import AsyncBatonClient, Completion
from baton.kvtransfer.tier.records import HEADER_BYTES, SegmentFormat, read_segment_header
from baton.text.block_groups import BlockGroups
from baton.text.block_hash import block_hashes, root_hash
from tests.e2e.conftest import run
from tests.e2e.stack import Stack, make_stack

BLOCK = 32
PROMPT = 20 * BLOCK + 5
STORED_S = 30.0
ONE_GROUP = BlockGroups()


def flags(directory: Path) -> list[str]:
    return ["--kv-tier-dir", str(directory), "--kv-tier-size", "64MiB", "--kv-tier-load", "always"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def disaggregated(tiny_llama: Path, tmp_path: Path, directory: Path) -> Iterator[Stack]:
    yield from run(make_stack(tmp_path / "stack", tiny_llama, prefill=2, worker_flags=flags(directory)))


@pytest.fixture
def colocated(tiny_llama: Path, tmp_path: Path, directory: Path) -> Iterator[Stack]:
    yield from run(make_stack(tmp_path / "stack", tiny_llama, prefill=0, worker_flags=flags(directory)))


def prompt(seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(3, 500) for _ in range(PROMPT)]


async def ask(stack: Stack, token_ids: list[int], salt: str = "") -> Completion:
    async with AsyncBatonClient(stack.target, timeout_s=60) as baton:
        return await baton.complete(token_ids, max_tokens=40, temperature=0.0, ignore_eos=True, cache_salt=salt)


def names_stored(directory: Path) -> set[bytes]:
    """Read the names of the blocks from the files, since killed workers cannot report them."""
    names = set[bytes]()
    for path in directory.rglob("*.kv"):
        raw = path.read_bytes()
        if (segment := read_segment_header(raw[:HEADER_BYTES])) is None:
            continue
        format = SegmentFormat(*segment)
        begins = map(format.offset, range(format.slots(len(raw))))
        records = (format.read_record_header(raw[begin : begin + HEADER_BYTES]) for begin in begins)
        names |= {record.name for record in records if record is not None}
    return names


def is_stored(stack: Stack, directory: Path, token_ids: list[int], groups: BlockGroups = ONE_GROUP) -> bool:
    """Return whether all full blocks of the prompt are in files."""
    worker = stack.status().workers[0]
    root = root_hash(bytes.fromhex(worker.fingerprint), worker.model.dtype)
    hashes = block_hashes(root, token_ids, BLOCK)
    return names_stored(directory).issuperset(
        groups.name(each, group) for each in hashes for group in range(groups.count)
    )


def kill_all_workers(stack: Stack, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Kill and restart all workers. `meanwhile`: called while none is running."""
    workers = [name for name in stack.processes if name.startswith(("prefill", "decode"))]
    for name in workers:
        stack.processes[name].kill()
    meanwhile()
    stack.start(workers)
    stack.wait_ready()


async def the_same_after_kill(stack: Stack, directory: Path) -> Completion:
    token_ids = prompt(seed=1)
    first = await ask(stack, token_ids)
    assert first.usage.cached_tokens == 0
    await asyncio.to_thread(stack.wait_for, lambda: is_stored(stack, directory, token_ids), STORED_S, "blocks in files")
    await asyncio.to_thread(kill_all_workers, stack)
    again = await ask(stack, token_ids)
    assert again.choices[0].token_ids == first.choices[0].token_ids
    return again


async def test_prompt_is_loaded_after_kill_9_of_all_workers_with_an_equal_answer(
    disaggregated: Stack, directory: Path
) -> None:
    """It may go to any prefill worker, since they read each other's files."""
    again = await the_same_after_kill(disaggregated, directory)
    assert again.usage.cached_tokens == PROMPT // BLOCK * BLOCK
    salted = await ask(disaggregated, prompt(seed=1), salt="other")
    assert salted.usage.cached_tokens == 0
    assert salted.choices[0].token_ids == again.choices[0].token_ids
    status = await asyncio.to_thread(disaggregated.status)
    assert {worker.worker_id for worker in status.workers} == {"prefill-0", "prefill-1", "decode-0"}


async def test_colocated_worker_loads_prompts_from_files(colocated: Stack, directory: Path) -> None:
    again = await the_same_after_kill(colocated, directory)
    assert again.usage.cached_tokens == PROMPT // BLOCK * BLOCK


async def test_files_that_are_damaged_cost_computing_and_change_no_token(disaggregated: Stack, directory: Path) -> None:
    token_ids = prompt(seed=2)
    first = await ask(disaggregated, token_ids)
    await asyncio.to_thread(
        disaggregated.wait_for, lambda: is_stored(disaggregated, directory, token_ids), STORED_S, "blocks in files"
    )

    def damage() -> None:
        for path in directory.rglob("*.kv"):
            raw = bytearray(path.read_bytes())
            for place in range(5000, len(raw), 9000):
                raw[place] ^= 0x40
            path.write_bytes(raw)

    await asyncio.to_thread(kill_all_workers, disaggregated, damage)
    again = await ask(disaggregated, token_ids)
    assert again.choices[0].token_ids == first.choices[0].token_ids
    assert again.usage.cached_tokens < PROMPT // BLOCK * BLOCK
