"""With internal TLS set, KV goes encrypted between those alone that have a certificate of our authority."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from baton.cli.keys import make_certificates
from baton.kvtransfer.slices import PoolShape
from baton.kvtransfer.tcp.connection import Secure
from baton.kvtransfer.transport import BlockPair, PeerUnreachable, TransferError
from baton.process.security.tls import INTERNAL_NAME, InternalTls, TlsError
from tests.fixtures.session_client import eventually
from tests.fixtures.tcp_pair import TIMEOUT_S, TRANSFER, pool_bytes, reading, serving

SHAPE = PoolShape(40, 1 << 14)  # several records each
PAIRS = [BlockPair(block, block, 39 - block) for block in range(40)]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[InternalTls, InternalTls]:
    """Ours, and those of another authority."""
    folders = [tmp_path_factory.mktemp(name) for name in ("ours", "others")]
    for folder in folders:
        make_certificates(folder, (), days=1)
    ours, others = (InternalTls(f / "internal-ca.pem", f / "internal.pem", f / "internal-key.pem") for f in folders)
    return ours, others


@contextmanager
def tapped(port: int, seen: list[bytes]) -> Iterator[int]:
    """The port of a relay for one connection, which notes every byte of both directions."""
    listener = socket.create_server(("127.0.0.1", 0))

    def forward(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(1 << 16):
            seen.append(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    def relay() -> None:
        near, far = listener.accept()[0], socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        with near, far:
            there = threading.Thread(target=forward, args=(near, far))
            there.start()
            forward(far, near)
            there.join(TIMEOUT_S)

    relaying = threading.Thread(target=relay)
    relaying.start()
    try:
        yield listener.getsockname()[1]
    finally:
        relaying.join(TIMEOUT_S)
        listener.close()


@pytest.mark.parametrize("secured", [True, False])
def test_blocks_are_copied_bit_for_bit_and_never_in_clear_with_tls(
    secured: bool, certificates: tuple[InternalTls, InternalTls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kvtransfer.tcp.reader.MOST_CONNECTIONS", 2)
    tls = certificates[0].streams()
    pool, own, seen = pool_bytes(SHAPE), torch.zeros(SHAPE.part_bytes, dtype=torch.uint8), list[bytes]()
    with (
        serving(pool, SHAPE, range(40), tls.accepted if secured else None) as server,
        tapped(server.port, seen) as port,
        reading(port, own, SHAPE, secure=tls.connected if secured else None) as transport,
    ):
        transport.copy(TRANSFER, PAIRS)
    assert torch.equal(own.view(40, -1).flip(0).flatten(), pool)
    on_the_wire = b"".join(seen)
    assert len(on_the_wire) > SHAPE.part_bytes
    assert (bytes(pool[:32].tolist()) not in on_the_wire, TRANSFER not in on_the_wire) == (secured, secured)


async def test_reader_in_clear_or_without_a_certificate_of_ours_gets_nothing(
    certificates: tuple[InternalTls, InternalTls],
) -> None:
    ours, others = certificates
    own = torch.zeros(SHAPE.part_bytes, dtype=torch.uint8)
    with serving(pool_bytes(SHAPE), SHAPE, range(40), ours.streams().accepted) as server:
        for secure in (None, others.streams().connected, without_certificate(ours)):
            with (
                pytest.raises(TransferError),  # at the latest when it is read
                reading(server.port, own, SHAPE, secure=secure) as transport,
            ):
                transport.copy(TRANSFER, PAIRS)
        await eventually(lambda: len(server) == 0)
    assert not own.any()


def without_certificate(tls: InternalTls) -> Secure:
    """It trusts our authority, but shows nothing."""
    context = ssl.create_default_context(cafile=str(tls.authority))
    return lambda incoming, outgoing: context.wrap_bio(incoming, outgoing, server_hostname=INTERNAL_NAME)


def test_source_without_a_certificate_of_ours_is_not_read(certificates: tuple[InternalTls, InternalTls]) -> None:
    ours, others = certificates
    own = torch.zeros(SHAPE.part_bytes, dtype=torch.uint8)
    for secure in (None, others.streams().accepted):
        with (
            serving(pool_bytes(SHAPE), SHAPE, range(40), secure, timeout_s=1.0) as server,
            pytest.raises(PeerUnreachable),
            reading(server.port, own, SHAPE, secure=ours.streams().connected),
        ):
            pytest.fail("it was connected with")


def test_each_connection_of_a_measured_link_is_secured(
    certificates: tuple[InternalTls, InternalTls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kvtransfer.tcp.reader.WORTH", 0.0)
    monkeypatch.setattr("baton.kvtransfer.tcp.reader.SHARE_BYTES", SHAPE.block_bytes)
    tls = certificates[0].streams()
    own = torch.zeros(SHAPE.part_bytes, dtype=torch.uint8)
    with (
        serving(pool_bytes(SHAPE), SHAPE, range(40), tls.accepted) as server,
        reading(server.port, own, SHAPE, secure=tls.connected) as transport,
    ):
        assert transport.measure(1 << 18).gb_per_s > 0
        assert len(transport._connections) == len(server) == 4
        transport.copy(TRANSFER, PAIRS)
    assert torch.equal(own.view(40, -1).flip(0).flatten(), pool_bytes(SHAPE))


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    missing = InternalTls(tmp_path / "ca", tmp_path / "certificate", tmp_path / "key")
    with pytest.raises(TlsError, match="certificate"):
        missing.streams()
