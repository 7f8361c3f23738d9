import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from unittest.mock import Mock

import pytest
import torch

from baton.kvtransfer.puller import PullThread
from baton.kvtransfer.transport import BlockPair, CopyBroken, CopyStuck, LinkRate

BOUND_S = 20.0
PAIRS = [BlockPair(0, 1, 2), BlockPair(1, 2, 3)]
TRANSFER = b"t" * 16


class FakeTransport:
    """Each copy waits until it is let go on."""

    name = "fake"

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.started, self.go_on, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.copied: list[bytes] = []
        self.threads: set[int] = set()
        self.cores: set[int] = set()

    def copy(self, transfer_id: bytes, pairs: Sequence[BlockPair]) -> int:
        self.threads.add(threading.get_ident())
        self.cores = os.sched_getaffinity(0)
        self.started.set()
        assert self.go_on.wait(BOUND_S)
        if self.error is not None:
            raise self.error
        self.copied.append(transfer_id)
        self.ended.set()
        return 10 * len(pairs)

    def measure(self, nbytes: int) -> LinkRate:
        self.threads.add(threading.get_ident())
        return LinkRate(nbytes, 1.0)

    def close(self) -> None:
        raise AssertionError("the thread does not own transports")


@pytest.fixture
def transport() -> Iterator[FakeTransport]:
    transport = FakeTransport()
    yield transport
    transport.go_on.set()  # a failed test must not leave the thread waiting


@pytest.fixture
def pulls(transport: FakeTransport) -> Iterator[PullThread]:
    pulls = PullThread(None)
    yield pulls
    transport.go_on.set()
    pulls.close()


async def started(transport: FakeTransport) -> None:
    assert await asyncio.to_thread(transport.started.wait, BOUND_S)


async def turn_loop(times: int = 10) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


async def test_copy_tells_its_bytes_and_time(pulls, transport):
    transport.go_on.set()
    result = await pulls.copy(transport, TRANSFER, PAIRS)
    assert result.bytes == 20
    assert result.seconds > 0
    assert transport.copied == [TRANSFER]


async def test_copies_and_measurements_share_one_thread_off_the_loop(pulls, transport):
    transport.go_on.set()
    await asyncio.gather(*(pulls.copy(transport, TRANSFER, PAIRS) for _ in range(3)))
    assert (await pulls.measure(transport, 5)).bytes == 5
    assert len(transport.threads) == 1
    assert threading.get_ident() not in transport.threads


async def test_errors_of_a_transport_arrive(pulls):
    broken = FakeTransport(CopyBroken("link down"))
    broken.go_on.set()
    with pytest.raises(CopyBroken, match="link down"):
        await pulls.copy(broken, TRANSFER, PAIRS)


async def test_cancelled_copy_ends_after_its_last_write(pulls, transport):
    task = asyncio.create_task(pulls.copy(transport, TRANSFER, PAIRS))
    await started(transport)
    for _ in range(3):  # an impatient caller changes nothing
        task.cancel()
        await turn_loop()
        assert not task.done()
    transport.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(BOUND_S):
            await task
    assert transport.ended.is_set()


async def test_copy_that_fails_while_it_is_cancelled_is_just_cancelled(pulls):
    broken = FakeTransport(CopyBroken("link down"))
    task = asyncio.create_task(pulls.copy(broken, TRANSFER, PAIRS))
    await started(broken)
    task.cancel()
    await turn_loop()
    broken.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(BOUND_S):
            await task


async def test_copy_cancelled_in_the_queue_never_runs(pulls, transport):
    first = asyncio.create_task(pulls.copy(transport, b"first", PAIRS))
    await started(transport)
    second = asyncio.create_task(pulls.copy(transport, b"second", PAIRS))
    await turn_loop()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(BOUND_S):
            await second  # although the first still holds the thread
    transport.go_on.set()
    await first
    assert transport.copied == [b"first"]


@pytest.mark.parametrize(("name", "index"), [("cuda:1", 1), ("cuda", 0)])
async def test_gpu_of_the_pool_is_current_on_the_thread_before_its_first_copy(monkeypatch, transport, name, index):
    calls: list[tuple[str, int]] = []
    stream = Mock(synchronize=lambda: calls.append(("waited", threading.get_ident())))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append((f"set {device}", threading.get_ident())))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    pulls = PullThread(None, device=torch.device(name))
    transport.go_on.set()
    for _ in range(2):
        await pulls.copy(transport, TRANSFER, PAIRS)
    pulls.close()
    [thread] = transport.threads
    assert calls == [(f"set {index}", thread), ("waited", thread)]


async def test_thread_stays_on_its_cores_and_leaves_the_others_alone(transport):
    before = os.sched_getaffinity(0)
    core = max(before)
    pulls = PullThread(frozenset({core}))
    transport.go_on.set()
    await pulls.copy(transport, TRANSFER, PAIRS)
    pulls.close()
    assert transport.cores == {core}
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("cores", [frozenset({100_000}), frozenset[int](), frozenset({0, 100_000}), frozenset({-1})])
def test_missing_cores_are_rejected(cores):
    with pytest.raises(ValueError, match="cores"):
        PullThread(cores)


def test_closing_ends_the_thread():
    before = set(threading.enumerate())  # of other tests some may end meanwhile
    pulls = PullThread(frozenset(os.sched_getaffinity(0)))
    [thread] = set(threading.enumerate()) - before
    pulls.close()
    assert not thread.is_alive()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_stuck_copy_is_dealt_with_before_its_blocks_are_free(cancelled: bool) -> None:
    """Also where its request is gone by then."""
    transport, noted = FakeTransport(CopyStuck("copy on cuda:0")), list[tuple[str, bool]]()
    pulls = PullThread(None, lambda stuck: noted.append((str(stuck), copying.done())))
    copying = asyncio.create_task(pulls.copy(transport, TRANSFER, PAIRS))
    await asyncio.to_thread(transport.started.wait, BOUND_S)
    if cancelled:
        copying.cancel()
    transport.go_on.set()
    with pytest.raises(asyncio.CancelledError if cancelled else CopyStuck):
        await copying
    assert noted == [("copy on cuda:0", False)]
    pulls.close()
