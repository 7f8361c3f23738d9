"""A source or a reader that refuses, dies, hangs or sends nonsense: a named error in time, and no other byte moved."""

import socket
import struct
import threading
from collections.abc import Callable

import pytest
import torch

from baton.kvtransfer.slices import PoolShape
from baton.kvtransfer.tcp import server as tcp_server
from baton.kvtransfer.tcp.connection import connect
from baton.kvtransfer.tcp.messages import HEAD, MAX_PROBE_BYTES, REQUEST, Head, Verdict, write_head
from baton.kvtransfer.transport import BlockPair, CopyBroken, CopyRefused, LinkBroken, PeerUnreachable
from tests.fixtures.session_client import eventually
from tests.fixtures.tcp_pair import POOL_ID, TIMEOUT_S, TRANSFER, peer, pool_bytes, reading, serving

SHAPE = PoolShape(8, 64)
WHOLE = [BlockPair(block, block, block) for block in range(8)]
SHORT_S = 0.5  # a request that is sent must arrive within it


def empty() -> torch.Tensor:
    return torch.zeros(SHAPE.part_bytes, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("identity", "pairs", "reason"),
    [
        (b"?" * 16, WHOLE[:1], "the transfer has ended or was never announced"),
        (TRANSFER, WHOLE[3:5], "the range exceeds the readable blocks"),
        (TRANSFER, [BlockPair(2**40, 0, 0)], "the range exceeds the readable blocks"),
    ],
)
def test_rejected_read_moves_nothing_and_keeps_the_link(identity: bytes, pairs: list[BlockPair], reason: str) -> None:
    own = empty()
    with serving(pool_bytes(SHAPE), SHAPE, range(4)) as server, reading(server.port, own, SHAPE) as transport:
        with pytest.raises(CopyRefused, match=reason):
            transport.copy(identity, pairs)
        assert not own.any()
        assert transport.copy(TRANSFER, WHOLE[:4]) == 4 * SHAPE.block_bytes
    assert torch.equal(own[: 4 * SHAPE.block_bytes], pool_bytes(SHAPE)[: 4 * SHAPE.block_bytes])
    assert not own[4 * SHAPE.block_bytes :].any()


def test_stopping_source_rejects_later_requests() -> None:
    with serving(pool_bytes(SHAPE), SHAPE, range(8)) as server, reading(server.port, empty(), SHAPE) as transport:
        server.detach()
        with pytest.raises(CopyRefused, match="stopping"):
            transport.copy(TRANSFER, WHOLE)


def test_source_without_known_permissions_rejects() -> None:
    def hang(transfer_id: bytes, first: int, number: int) -> list[int]:
        raise TimeoutError

    with serving(pool_bytes(SHAPE), SHAPE, range(8)) as server, reading(server.port, empty(), SHAPE) as transport:
        server.attach(hang)
        with pytest.raises(CopyRefused, match="does not respond"):
            transport.copy(TRANSFER, WHOLE)


def test_reader_that_does_not_know_the_pool_reads_nothing_of_it() -> None:
    with (
        serving(pool_bytes(SHAPE), SHAPE, range(8)) as server,
        reading(server.port, empty(), SHAPE, pool_id=b"x" * 16) as transport,
    ):
        with pytest.raises(CopyRefused, match="the pool that the reader paired with is gone"):
            transport.copy(TRANSFER, WHOLE)
        with pytest.raises(LinkBroken):
            transport.copy(TRANSFER, WHOLE)


def test_no_more_than_a_probe_may_have_is_sent_to_measure() -> None:
    with (
        serving(pool_bytes(SHAPE), SHAPE, range(8)) as server,
        reading(server.port, empty(), SHAPE) as transport,
        pytest.raises(CopyRefused),
    ):
        transport.measure(MAX_PROBE_BYTES + 1)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n".ljust(REQUEST.size), struct.pack("<8sB", b"BATONKV1", 9)])
async def test_malformed_request_ends_the_connection_unanswered(sent: bytes) -> None:
    with serving(pool_bytes(SHAPE), SHAPE, range(8)) as server:
        with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as stream:
            stream.sendall(sent.ljust(REQUEST.size, b"\0"))
            assert stream.recv(1) == b""
        await eventually(lambda: len(server) == 0)


async def test_connection_that_asks_for_nothing_is_ended_in_time() -> None:
    with serving(pool_bytes(SHAPE), SHAPE, range(8), timeout_s=SHORT_S) as server:
        with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as stream:
            assert stream.recv(1) == b""
        await eventually(lambda: len(server) == 0)


def test_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "MOST_CONNECTIONS", 1)
    with serving(pool_bytes(SHAPE), SHAPE, range(8)) as server, reading(server.port, empty(), SHAPE) as transport:
        transport.copy(TRANSFER, WHOLE)
        with reading(server.port, empty(), SHAPE) as other, pytest.raises(LinkBroken):
            other.copy(TRANSFER, WHOLE)


def answer(head: bytes, data: bytes, then: Callable[[], object] = lambda: None) -> Callable[[socket.socket], None]:
    def behave(stream: socket.socket) -> None:
        stream.recv(REQUEST.size, socket.MSG_WAITALL)
        stream.sendall(head + data)
        then()

    return behave


GOOD = write_head(Head(Verdict.SENT, SHAPE.part_bytes))


@pytest.mark.parametrize(
    ("head", "data", "reason"),
    [
        (GOOD, b"a" * 100, "the peer closed the connection"),
        (b"", b"", "the peer closed the connection"),
        (HEAD.pack(99, 0), b"", "invalid response header"),
        (write_head(Head(Verdict.SENT, 7)), b"", "announced 7 bytes, expected 512"),
    ],
    ids=["in the middle", "before the answer", "no answer", "another length"],
)
def test_source_that_dies_in_the_middle_or_sends_nonsense_breaks_the_link(
    head: bytes, data: bytes, reason: str
) -> None:
    own = empty()
    with peer(answer(head, data)) as port, reading(port, own, SHAPE) as transport:
        with pytest.raises(LinkBroken, match=reason):
            transport.copy(TRANSFER, WHOLE)
        with pytest.raises(LinkBroken):
            transport.copy(TRANSFER, WHOLE)
    assert not own[len(data) :].any()


@pytest.mark.parametrize("data", [b"", b"a" * 100], ids=["before the first byte", "in the middle"])
def test_hanging_source_times_out(data: bytes) -> None:
    go_on = threading.Event()
    hanging = answer(GOOD if data else b"", data, lambda: go_on.wait(TIMEOUT_S))
    with peer(hanging) as port, reading(port, empty(), SHAPE, timeout_s=SHORT_S) as transport:
        with pytest.raises(LinkBroken, match=r"0\.5 s"):
            transport.copy(TRANSFER, WHOLE)
        go_on.set()


def test_close_ends_a_waiting_copy_immediately() -> None:
    asked, go_on = threading.Event(), threading.Event()

    def stand_still() -> None:
        asked.set()
        go_on.wait(TIMEOUT_S)

    failures: list[CopyBroken] = []
    with peer(answer(GOOD, b"", stand_still)) as port, reading(port, empty(), SHAPE, timeout_s=TIMEOUT_S) as transport:

        def copy() -> None:
            try:
                transport.copy(TRANSFER, WHOLE)
            except CopyBroken as error:
                failures.append(error)

        copying = threading.Thread(target=copy)
        copying.start()
        assert asked.wait(TIMEOUT_S)
        transport.close()
        copying.join(TIMEOUT_S / 2)
        assert len(failures) == 1
        go_on.set()
        with pytest.raises(LinkBroken, match="was closed"):
            transport.copy(TRANSFER, WHOLE)


async def test_stalled_reader_times_out() -> None:
    large = PoolShape(8, 4 << 20)
    with (
        serving(pool_bytes(large), large, range(8), timeout_s=SHORT_S) as server,
        socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as stream,
    ):
        stream.sendall(REQUEST.pack(b"BATONKV1", 0, POOL_ID, TRANSFER, 0, 8))
        head = stream.recv(HEAD.size, socket.MSG_WAITALL)  # and nothing of what it announces
        assert head == write_head(Head(Verdict.SENT, large.part_bytes))
        await eventually(lambda: len(server) == 0)


async def test_nothing_is_left_of_a_link_or_a_server_that_were_closed() -> None:
    with serving(pool_bytes(SHAPE), SHAPE, range(8)) as server:
        with reading(server.port, empty(), SHAPE) as transport:
            transport.measure(1 << 16)
            transport.copy(TRANSFER, WHOLE)
            assert len(server) >= 1
        await eventually(lambda: len(server) == 0)
    names = {"kv-accept", "kv-send", "kv-pull-more_0"}
    await eventually(lambda: not names & {thread.name for thread in threading.enumerate()})
    with pytest.raises(PeerUnreachable):
        connect("127.0.0.1", server.port, None, TIMEOUT_S)
