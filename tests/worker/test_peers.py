"""Links to prefill workers: shared by pulls, closed when the last one is done, never a link to another's memory."""

import asyncio

import pytest

from baton.engine.request import Reservation
from baton.process.registry.redis_server import free_port
from baton.worker.transfer.peers import PeerFailed
from baton.worker.transfer.reader import TransferFailed
from tests.fixtures.session_client import SessionClient, eventually
from tests.fixtures.worker_stack import DecodeStack, PrefillStack, prompt_command, running


async def test_forgotten_peer_stays_usable_until_it_is_given_back() -> None:
    async with running(PrefillStack()) as prefill, running(DecodeStack()) as decode:
        first = await decode.peers.borrow(prefill.endpoint)
        second = await decode.peers.borrow(prefill.endpoint)
        assert first is second
        decode.peers.forget(first)
        decode.peers.give_back(first)
        assert first.transport.measure(64).bytes == 64
        again = await decode.peers.borrow(prefill.endpoint)
        assert again is not second
        decode.peers.give_back(second)
        await eventually(lambda: not decode.peers._closing)
        decode.peers.forget(again)
        decode.peers.give_back(again)


async def test_failed_pairing_is_tried_again() -> None:
    async with running(DecodeStack()) as decode:
        with pytest.raises(PeerFailed):
            await decode.peers.borrow("127.0.0.1:1")
        assert not decode.peers._pairings


async def test_cancelled_waiter_does_not_end_the_pairing_of_others() -> None:
    async with running(PrefillStack()) as prefill, running(DecodeStack()) as decode:
        impatient = asyncio.create_task(decode.peers.borrow(prefill.endpoint))
        patient = asyncio.create_task(decode.peers.borrow(prefill.endpoint))
        await asyncio.sleep(0)
        impatient.cancel()
        peer = await patient
        assert peer.users == 1
        decode.peers.give_back(peer)


async def test_returning_prefill_worker_is_paired_again() -> None:
    async with running(DecodeStack()) as decode:
        old, new, port = PrefillStack(), PrefillStack(), free_port()
        await old.start(port)
        peer = await decode.peers.borrow(old.endpoint)
        decode.peers.give_back(peer)
        await old.stop()
        await new.start(port)
        async with SessionClient(new.endpoint) as router:
            await router.send(prefill=prompt_command(1, b"1" * 16, tokens=4))
            await router.one("first_step", 1)
            new.memory.tensor.fill_(9)
            pull = await decode.reader.pull(new.endpoint, b"1" * 16, Reservation((5,), 0))
        assert pull.bytes == 64 and peer.forgotten
        assert decode.storage.view(-1, 64)[5].eq(9).all()
        await new.stop()


async def test_link_of_a_broken_transfer_is_forgotten() -> None:
    async with running(DecodeStack()) as decode:
        prefill = PrefillStack()
        await prefill.start()
        pulling = asyncio.create_task(decode.reader.pull(prefill.endpoint, b"1" * 16, Reservation((5,), 0)))
        await eventually(lambda: len(prefill.table) == 1)
        await prefill.server.stop(0)
        with pytest.raises(TransferFailed):
            await pulling
        await decode.reader.close()
        await prefill.stop()


async def test_closed_set_of_peers_lends_nothing() -> None:
    decode = DecodeStack()
    await decode.start()
    await decode.stop()
    with pytest.raises(PeerFailed):
        await decode.peers.borrow("127.0.0.1:1")
