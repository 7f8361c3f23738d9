"""Which prompts wait for the copy of one that was given up: those that go on from it, and no others."""

import asyncio
from typing import Any

from baton.decode_worker.admission import PartialPrefixes
from baton.decode_worker.answer import answer_to
from baton.protos import session_pb2

SYSTEM, QUESTION, OTHER, ANSWER = (bytes([number]) * 32 for number in range(4))


async def waits(partial_prefixes: PartialPrefixes, *block_hashes: bytes) -> bool:
    waiting = asyncio.create_task(partial_prefixes.settled(block_hashes))
    for _ in range(3):
        await asyncio.sleep(0)
    if waiting.done():
        return False
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    return True


async def never() -> None:
    await asyncio.Event().wait()


async def end(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_only_a_prompt_extending_the_prefix_waits() -> None:
    partial_prefixes, copy = PartialPrefixes(), asyncio.create_task(never())
    partial_prefixes.add(QUESTION, copy)
    assert await waits(partial_prefixes, SYSTEM, QUESTION)
    assert await waits(partial_prefixes, SYSTEM, QUESTION, ANSWER), "a replay is longer by what was answered"
    assert not await waits(partial_prefixes, SYSTEM, OTHER), "a system prompt in common is no reason to wait"
    assert not await waits(partial_prefixes)
    await end(copy)
    assert not await waits(partial_prefixes, SYSTEM, QUESTION) and len(partial_prefixes) == 0


async def test_prompts_with_one_system_prompt_do_not_displace_each_other() -> None:
    partial_prefixes = PartialPrefixes()
    copies = [asyncio.create_task(never()) for _ in range(3)]
    for last_block, copy in zip((QUESTION, OTHER, QUESTION), copies, strict=True):
        partial_prefixes.add(last_block, copy)
    assert await waits(partial_prefixes, SYSTEM, QUESTION) and await waits(partial_prefixes, SYSTEM, OTHER)
    await end(copies[2])
    assert await waits(partial_prefixes, SYSTEM, QUESTION), "the other one of the same tokens still copies"
    await end(*copies[:2])
    assert len(partial_prefixes) == 0


def test_command_is_known_by_its_last_block() -> None:
    session: Any = None
    commands = [session_pb2.Start(block_hashes=hashes) for hashes in ([SYSTEM, QUESTION], [])]
    assert [answer_to(command, 1, session, 4).last_block for command in commands] == [QUESTION, b""]


async def test_prompt_that_keeps_out_of_the_cache_is_not_waited_for() -> None:
    partial_prefixes, copy = PartialPrefixes(), asyncio.create_task(never())
    partial_prefixes.add(b"", copy)
    assert len(partial_prefixes) == 0
    await end(copy)
