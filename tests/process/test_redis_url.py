"""Addresses of Redis: refused before a process starts where they cannot work; with a password and TLS they do."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.cli.keys import make_certificates
from baton.process.config import ConfigError, RegistryConfig
from baton.process.registry.redis_registry import RedisRegistry, RegistryUnavailable
from baton.process.registry.redis_server import start_redis_server
from baton.process.registry.redis_url import check_redis_url, without_password

PASSWORD = "not-for-logs"


@pytest.mark.parametrize(
    "url",
    ["redis://redis:6379/0", "redis://:word@redis:6379", "rediss://user:word@redis:6380/1", "unix:///run/redis.sock"],
)
def test_addresses_that_redis_clients_know_are_accepted(url: str) -> None:
    check_redis_url(url)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("redis:6379", "must begin with redis://"),
        ("https://:not-for-logs@redis", "must begin with redis://"),
        ("redis:///0", "no host"),
        ("redis://:not-for-logs@redis:many/0", "a number up to 65535"),
        ("redis://redis/0?ssl_ca_certs=/etc/hosts", "needs rediss://"),
        ("rediss://:not-for-logs@redis/0?ssl_ca_certs=/none/ca.pem", "there is no file /none/ca.pem"),
    ],
)
def test_address_that_cannot_work_is_refused_without_its_password(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        RegistryConfig(redis_url=url)
    assert "--redis-url" in str(error.value) and PASSWORD not in str(error.value)


def test_address_is_shown_without_its_password() -> None:
    assert without_password(f"rediss://user:{PASSWORD}@redis:6380/0") == "rediss://redis:6380/0"
    assert without_password("redis://redis:6379/0") == "redis://redis:6379/0"


@pytest.fixture
async def encrypted(tmp_path: Path) -> AsyncIterator[str]:
    """A Redis with a password behind TLS: its address, without the query."""
    make_certificates(tmp_path / "certs", (), days=1)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "certs" / "server.pem", tmp_path / "certs" / "server-key.pem")
    server = start_redis_server()
    port = int(server.url.rpartition(":")[2].partition("/")[0])

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, behind), pump(behind_reader, writer), return_exceptions=True)

    plain = RedisRegistry(server.url, "test")
    await plain.redis.config_set("requirepass", PASSWORD)
    front = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context)
    yield f"rediss://:{PASSWORD}@127.0.0.1:{front.sockets[0].getsockname()[1]}/0"
    front.close()
    await plain.close()
    server.stop()


async def test_redis_with_password_and_tls_serves_with_its_authority_and_no_other(
    encrypted: str, tmp_path: Path
) -> None:
    right, wrong = tmp_path / "certs" / "ca.pem", tmp_path / "certs" / "internal-ca.pem"
    config = RegistryConfig(redis_url=f"{encrypted}?ssl_ca_certs={right}")
    registry = RedisRegistry(str(config.redis_url), config.namespace)
    assert await registry.take_epoch(7) == 7
    await registry.close()
    for refused in (f"{encrypted}?ssl_ca_certs={wrong}", f"{encrypted.replace(PASSWORD, 'x')}?ssl_ca_certs={right}"):
        stranger = RedisRegistry(refused, config.namespace)
        with pytest.raises(RegistryUnavailable) as error:
            await stranger.take_epoch(7)
        assert PASSWORD not in str(error.value)
        await stranger.close()
