"""KV over process groups between real servicers: gloo runs the same code that NCCL does on GPUs."""

import asyncio
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from baton.engine.request import Reservation
from baton.kvtransfer import group_messages
from baton.kvtransfer.process_group import GroupOptions
from baton.kvtransfer.transport import BlockPair, CopyRefused
from baton.worker.transfer import process_groups
from baton.worker.transfer.peers import PeerFailed
from baton.worker.transfer.reader import TransferFailed
from tests.fixtures.session_client import eventually
from tests.fixtures.sockets import listening, tcp_sockets
from tests.fixtures.worker_stack import BLOCK_BYTES, DecodeStack, PrefillStack, compute_prompt, linked, running

GLOO = GroupOptions("gloo", "lo", torch.device("cpu"), timeout_s=10.0)
ID = b"t" * 16


@asynccontextmanager
async def both() -> AsyncIterator[tuple[PrefillStack, DecodeStack]]:
    async with (
        running(PrefillStack(groups=GLOO)) as prefill,
        running(DecodeStack(transport="gloo", groups=GLOO)) as decode,
    ):
        yield prefill, decode


def pool_of(stack: PrefillStack | DecodeStack) -> torch.Tensor:
    return stack.memory.tensor.view(-1, BLOCK_BYTES)


async def test_blocks_are_copied_bit_for_bit_and_the_link_is_measured() -> None:
    async with both() as (prefill, decode):
        await compute_prompt(prefill, ID)
        pull = await decode.reader.pull(prefill.endpoint, ID, Reservation((7, 2, 5), 0))
        assert (pull.transport, pull.bytes) == ("gloo", 3 * BLOCK_BYTES)
        assert torch.equal(pool_of(decode)[[7, 2, 5]], pool_of(prefill)[:3])
        async with linked(prefill, decode) as peer:
            [link] = decode.peers.links
            assert (link.transport, link.gb_per_s, link.fallback) == ("gloo", peer.rate.gb_per_s, "")
            assert link.gb_per_s > 0


async def test_kernels_for_messages_are_compiled_on_neither_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    monkeypatch.setattr(group_messages, "compile_copies", lambda *tensors: threads.append(threading.current_thread()))
    async with both() as (prefill, decode), linked(prefill, decode):
        assert len(threads) == 2  # of either end
        assert threading.current_thread() not in threads


async def test_group_without_compilable_kernels_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with both() as (prefill, decode):
        with monkeypatch.context() as patched:
            patched.setattr(process_groups, "GroupTransport", Mock(side_effect=RuntimeError("no compiler")))
            with pytest.raises(PeerFailed, match="gloo group not formed: no compiler"):
                await decode.peers.borrow(prefill.endpoint)
        await eventually(lambda: not prefill.host)
        async with linked(prefill, decode) as peer:
            assert peer.transport.name == "gloo"


async def test_only_the_interface_that_was_named_is_listened_on() -> None:
    before = listening(os.getpid())
    async with both() as (prefill, decode), linked(prefill, decode):
        opened = listening(os.getpid()) - before
        ports = {prefill.port, decode.port, prefill.tcp.port, decode.tcp.port}
        assert {host for host, _ in opened} == {"127.0.0.1"}
        assert len({port for _, port in opened} - ports) == 2  # one for each rank


async def test_rejected_read_keeps_the_group() -> None:
    async with both() as (prefill, decode), linked(prefill, decode) as peer:
        with pytest.raises(CopyRefused):
            await asyncio.to_thread(peer.transport.copy, b"?" * 16, [BlockPair(0, 0, 3)])
        await compute_prompt(prefill, ID)
        await decode.reader.pull(prefill.endpoint, ID, Reservation((7, 2, 5), 0))
        async with linked(prefill, decode) as same:
            assert same is peer


async def test_groups_end_with_their_reader_and_leave_nothing() -> None:
    async with both() as (prefill, decode):

        async def come_and_go() -> None:
            async with linked(prefill, decode) as peer:
                decode.peers.forget(peer)
            await eventually(lambda: not prefill.host and not prefill.host._closing and not decode.peers._closing)
            await eventually(lambda: not [each for each in threading.enumerate() if each.name.startswith("kv-send")])

        await come_and_go()
        stay = len(tcp_sockets(os.getpid()))  # the first one sets them up, as threads of the event loop
        for _ in range(2):
            await come_and_go()
            await eventually(lambda: len(tcp_sockets(os.getpid())) <= stay)


async def test_group_ended_by_the_source_is_created_again() -> None:
    async with both() as (prefill, decode):
        async with linked(prefill, decode) as peer:
            next(iter(prefill.host._groups.values())).broken.set()
            await eventually(lambda: not prefill.host)
            await compute_prompt(prefill, ID)
            with pytest.raises(TransferFailed):
                await decode.reader.pull(prefill.endpoint, ID, Reservation((7, 2, 5), 0))
            assert peer.forgotten
        other = secrets.token_bytes(16)
        await compute_prompt(prefill, other, attempt_id=2)
        pull = await decode.reader.pull(prefill.endpoint, other, Reservation((7, 2, 5), 0))
        assert pull.transport == "gloo"


async def test_stalled_source_times_out_with_the_group() -> None:
    go_on = threading.Event()
    impatient = replace(GLOO, timeout_s=2.0)
    async with (
        running(PrefillStack(groups=GLOO)) as prefill,
        running(DecodeStack(transport="gloo", groups=impatient)) as decode,
        linked(prefill, decode) as peer,
    ):
        await compute_prompt(prefill, ID)
        next(iter(prefill.host._groups.values())).sender._executor.submit(go_on.wait, 30)
        started = time.monotonic()
        with pytest.raises(TransferFailed, match="Timed out waiting"):
            await decode.reader.pull(prefill.endpoint, ID, Reservation((7, 2, 5), 0))
        assert 1.9 < time.monotonic() - started < GLOO.timeout_s
        assert peer.forgotten
        go_on.set()


async def test_worker_without_groups_is_read_over_tcp_unless_a_group_was_demanded() -> None:
    async with running(PrefillStack(shared=False)) as prefill:
        async with running(DecodeStack(groups=GLOO)) as decode, linked(prefill, decode):
            [link] = decode.peers.links
            assert (link.endpoint, link.transport) == (prefill.endpoint, "tcp")
            assert "gloo is not available on the peer" in link.fallback
        async with running(DecodeStack(transport="gloo", groups=GLOO)) as decode:
            with pytest.raises(PeerFailed, match="gloo is not available on the peer"):
                await decode.peers.borrow(prefill.endpoint)
