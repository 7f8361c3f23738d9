"""Certificates that are replaced on disk hold for the next connection, without a restart; those open are not broken."""

import asyncio
import shutil
import ssl
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.cli.keys import FILES, make_certificates
from baton.process.security.tls import InternalTls, TlsFiles, open_async_channel
from tests.fixtures.servers import loop_server

WAIT_S = 20.0
FRESH = (("grpc.use_local_subchannel_pool", 1),)  # no connection is shared with another channel


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two sets of certificates, each of its own authorities."""
    folders = (tmp_path_factory.mktemp("old") / "tls", tmp_path_factory.mktemp("new") / "tls")
    for folder in folders:
        make_certificates(folder, (), days=1)
    return folders


@pytest.fixture
def used(made: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "used"))


def replace(used: Path, by: Path) -> None:
    for name in FILES:
        shutil.copy(by / name, used / name)


def serving(credentials: grpc.ServerCredentials) -> AbstractAsyncContextManager[int]:
    """Serve health checks; the value is the port."""
    add = partial(health_pb2_grpc.add_HealthServicer_to_server, health.aio.HealthServicer())
    return loop_server(add, credentials=credentials)


async def answers(channel: grpc.aio.Channel) -> bool:
    try:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        return False
    return True


async def trusts(port: int, folder: Path) -> bool:
    credentials = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
    async with grpc.aio.secure_channel(f"localhost:{port}", credentials, FRESH) as channel:
        return await answers(channel)


def ours(folder: Path) -> InternalTls:
    return InternalTls(folder / "internal-ca.pem", folder / "internal.pem", folder / "internal-key.pem")


async def test_grpc_shows_the_new_certificate_and_keeps_open_connections(made: tuple[Path, Path], used: Path) -> None:
    old, new = made
    async with serving(TlsFiles(used / "server.pem", used / "server-key.pem").grpc_credentials()) as port:
        credentials = grpc.ssl_channel_credentials((old / "ca.pem").read_bytes())
        async with grpc.aio.secure_channel(f"localhost:{port}", credentials, FRESH) as before:
            assert await answers(before)
            replace(used, new)
            assert (await trusts(port, new), await trusts(port, old)) == (True, False)
            assert await answers(before)


@pytest.mark.parametrize("name", ["server.pem", "server-key.pem"])
@pytest.mark.parametrize("harm", ["swapped", "garbage", "gone"])
async def test_mismatched_files_change_nothing(
    made: tuple[Path, Path], used: Path, name: str, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = made
    async with serving(TlsFiles(used / "server.pem", used / "server-key.pem").grpc_credentials()) as port:
        if harm == "swapped":
            shutil.copy(new / name, used / name)
        elif harm == "garbage":
            (used / name).write_text("-----BEGIN NOTHING-----")
        else:
            (used / name).unlink()
        assert [await trusts(port, old) for _ in range(2)] == [True, True]
        assert sum("were not reloaded" in record.message for record in caplog.records) == 1
        replace(used, new)
        assert await trusts(port, new)


async def test_between_our_own_both_sides_change_with_the_files(made: tuple[Path, Path], used: Path) -> None:
    """And who shows a certificate of the old authority is no longer one of ours."""
    old, new = made
    async with serving(ours(used).grpc_credentials()) as port:
        for folder, expected in ((used, True), (new, False)):
            async with open_async_channel(f"127.0.0.1:{port}", FRESH, ours(folder)) as channel:
                assert await answers(channel) is expected
        replace(used, new)
        for folder, expected in ((used, True), (new, True), (old, False)):
            async with open_async_channel(f"127.0.0.1:{port}", FRESH, ours(folder)) as channel:
                assert await answers(channel) is expected


async def test_http_shows_the_new_certificate_and_keeps_open_connections(made: tuple[Path, Path], used: Path) -> None:
    old, new = made

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    context = TlsFiles(used / "server.pem", used / "server-key.pem").http_context()
    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]

    async def connected(folder: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        trusted = ssl.create_default_context(cafile=folder / "ca.pem")
        return await asyncio.open_connection("127.0.0.1", port, ssl=trusted)

    reader, writer = await connected(old)
    replace(used, new)
    with pytest.raises(ssl.SSLCertVerificationError):
        await connected(old)
    _, later = await connected(new)
    writer.write(b"still here\n")
    assert await asyncio.wait_for(reader.readline(), WAIT_S) == b"still here\n"
    for each in (writer, later):
        each.close()
        await each.wait_closed()
    server.close()
