"""What a drain leaves over goes to other workers, what a fault leaves does not; KV is taken before prefill ends."""

import asyncio
from typing import Any

import pytest

from baton.protos import session_pb2
from baton.worker.service import Drain
from tests.decode_worker.test_decode_service import pair
from tests.fixtures.session_client import SessionClient, eventually
from tests.fixtures.worker_stack import DecodeStack, PrefillStack, prompt_command, running, start_command


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("why", ["drain", "fault", "drain with a fault"])
async def test_work_left_over_by_a_drain_is_for_other_workers(role: str, why: str) -> None:
    prefill, decode = PrefillStack(), DecodeStack()
    await prefill.start()
    await decode.start()
    stack: Any = prefill if role == "prefill" else decode
    async with SessionClient(stack.endpoint) as router:
        if role == "prefill":
            await router.send(prefill=prompt_command(1, b"1" * 16))
            await router.one("first_step", 1)
        else:
            await router.send(start=start_command(1, b"1" * 16, prefill.endpoint))
            await eventually(lambda: len(prefill.table) == 1)
        router.acknowledges = True
        if "drain" in why:
            stack.service.leaving = True
        if "fault" in why:
            stack.service.broken = True
        await stack.service.close()
        await eventually(lambda: router.ended_with)
        told = [failed.reason for failed in router.about("failed", 1)]
        assert told == ([session_pb2.FAILURE_REASON_DRAINING] if why == "drain" else [])
    for each in (decode, prefill):
        await each.stop()
        assert each.counts.held == 0


async def test_tokens_before_the_hand_over_are_sent_first() -> None:
    async with running(PrefillStack()) as prefill:
        decode = DecodeStack()
        await decode.start()
        async with SessionClient(decode.endpoint) as router, SessionClient(prefill.endpoint) as to_prefill:
            decode.runner.hold_after(3)
            await router.send(start=start_command(1, b"1" * 16, prefill.endpoint, max_tokens=60))
            await to_prefill.send(prefill=prompt_command(1, b"1" * 16, max_tokens=60))
            await eventually(decode.runner.stepping.is_set)
            await asyncio.sleep(0)  # the step before was handed over by then: now it is taken in
            router.acknowledges = True
            decode.service.leaving = True
            await decode.service.close()
            failed = await router.one("failed", 1)
            assert failed.reason == session_pb2.FAILURE_REASON_DRAINING
            assert len(router.tokens(1)) == 4
            assert router.heard[-1].failed == failed
        decode.runner.let_go()
        await decode.stop()
        assert decode.counts.held == 0


async def test_prefill_drains_only_after_its_kv_was_pulled() -> None:
    async with pair() as both:
        drain = Drain(both.prefill.service)
        identity = b"3" * 16
        await both.to_prefill.send(prefill=prompt_command(1, identity))
        await both.to_prefill.one("first_step", 1)
        drain.begin()
        await eventually(lambda: both.prefill.service.draining)
        assert drain.busy and both.prefill.counts.held == 3
        await both.router.send(start=start_command(1, identity, both.prefill.endpoint))
        await eventually(lambda: len(both.router.tokens(1)) == 4)
        await eventually(lambda: not drain.busy)
