"""A router and workers that share a secret serve each other and nobody else; its admin port is for who knows it."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.process.config import ConfigError, read_config
from baton.process.security.cluster_secret import ClusterSecret
from baton.protos import admin_pb2
from baton.router.config import RouterConfig
from tests.router.conftest import Stack, text_of
from tests.router.fake_worker import FakePair

TEXT = "a secret of tests, not of a cluster"
OURS, OTHERS = ClusterSecret(TEXT), ClusterSecret("another secret of tests")


@pytest.fixture
def secrets_of_workers() -> tuple[ClusterSecret | None, ClusterSecret | None]:
    """Of the prefill and the decode worker."""
    return OURS, OURS


@pytest.fixture
def stopped_pair(
    stopped_pair: FakePair, secrets_of_workers: tuple[ClusterSecret | None, ClusterSecret | None]
) -> FakePair:
    stopped_pair.prefill.secret, stopped_pair.decode.secret = secrets_of_workers
    return stopped_pair


def shown(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def token(stack: Stack, secret: ClusterSecret) -> tuple[tuple[str, str], ...]:
    return shown(secret.admin_token(stack.router.running.ports[1]))


async def admin_code(stack: Stack, metadata: tuple[tuple[str, str], ...] = ()) -> grpc.StatusCode:
    code: grpc.StatusCode = await stack.admin.GetStatus(admin_pb2.GetStatusRequest(), metadata=metadata).code()
    return code


@pytest.mark.parametrize("settings", [{"secret": TEXT}], indirect=True)
async def test_router_and_workers_of_one_secret_answer(stack: Stack) -> None:
    assert text_of(await stack.generate("hello", max_tokens=5))


@pytest.mark.parametrize("settings", [{"secret": TEXT, "no_prefill_worker": "local"}], indirect=True)
@pytest.mark.parametrize("secrets_of_workers", [(OTHERS, OURS), (None, OURS)], ids=["of another", "of none"])
async def test_worker_without_the_secret_is_refused_and_is_sent_nothing(stack: Stack) -> None:
    stack.admin_metadata = token(stack, OURS)
    status = await stack.until(lambda status: any(worker.refused for worker in status.workers))
    [refused] = [worker for worker in status.workers if worker.refused]
    assert refused.endpoint == stack.prefill.endpoint and "secret" in refused.refused
    assert text_of(await stack.generate("hello", max_tokens=5))
    assert stack.prefill.commands == stack.prefill.probes == [] and stack.prefill.session is None


async def test_router_without_the_secret_is_refused_by_workers(stack: Stack) -> None:
    status = await stack.until(lambda status: all(worker.refused for worker in status.workers) and status.workers)
    assert not status.ready and "secret" in status.workers[0].refused
    assert stack.decode.session is None


@pytest.mark.parametrize("settings", [{"secret": TEXT}], indirect=True)
async def test_admin_port_of_a_secret_accepts_only_its_token(stack: Stack) -> None:
    codes = [await admin_code(stack, given) for given in ((), shown("x"), token(stack, OTHERS), token(stack, OURS))]
    assert codes == [grpc.StatusCode.UNAUTHENTICATED] * 3 + [grpc.StatusCode.OK]
    change = stack.admin.ChangeRole(admin_pb2.ChangeRoleRequest(worker_id="w", role="ROLE_DECODE"))
    assert await change.code() is grpc.StatusCode.UNAUTHENTICATED
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.router.running.ports[1]}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest())


def test_config_takes_a_secret_by_variable_or_file_and_never_by_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"
    file.write_text(TEXT + "\n")
    flags = ("--workers", "decode@h:1")
    expected = OURS.admin_token(1)
    with pytest.raises(ConfigError, match="unrecognized arguments: --secret"):
        read_config(RouterConfig, (*flags, "--secret", TEXT))
    by_file = read_config(RouterConfig, (*flags, "--secret-file", str(file))).cluster_secret
    monkeypatch.setenv("BATON_SECRET", TEXT)
    by_variable = read_config(RouterConfig, flags).cluster_secret
    assert by_file and by_variable and by_file.admin_token(1) == by_variable.admin_token(1) == expected
    for problem, words in (("none", "No such file"), ("short", "at least 16")):
        (tmp_path / "short").write_text("short")
        monkeypatch.delenv("BATON_SECRET", raising=False)
        with pytest.raises(ConfigError, match=words):
            read_config(RouterConfig, (*flags, "--secret-file", str(tmp_path / problem)))
