"""Who may call what, how far ports may reach, and the configuration of both."""

from pathlib import Path

import pytest

from baton.process.config import ConfigError, read_config
from baton.process.errors import PermissionDenied, Unauthenticated
from baton.process.objectives import LatencyObjectives, RequestedObjectives
from baton.process.security.api_keys import ApiKey, KeyLimits, KeyRing, digest_of
from baton.router.config import RouterConfig, is_loopback, too_open, warnings
from baton.router.process import address_of
from baton.router.public.access import Access, Caller, Need, tenant_of, tenant_of_key
from baton.router.types.request import GenerationRequest, Operation

USER = ApiKey("user", digest_of("baton-user"), KeyLimits(concurrency=2))
ADMIN = ApiKey("boss", digest_of("baton-boss"), is_admin=True)
GUARDED = Access(lambda: KeyRing((USER, ADMIN)))
REDIS = ("--redis-url", "redis://127.0.0.1:1")


def shown(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def test_key_makes_its_caller() -> None:
    caller = GUARDED.caller(Need.KEY, shown("baton-user"))
    assert caller == Caller("user", USER.limits, USER.key_salt)
    request = caller.asks(GenerationRequest(Operation.CHAT, None, tenant="forged", key_salt=b"forged"))
    assert (request.tenant, request.limits, request.key_salt) == ("user", USER.limits, USER.key_salt)


def test_objectives_of_a_request_precede_those_of_its_key() -> None:
    hurried = ApiKey("hurried", digest_of("k"), objectives=RequestedObjectives(ttft_slo_ms=500.0, tbt_slo_ms=20.0))
    caller = Access(lambda: KeyRing((hurried,))).caller(Need.KEY, shown("k"))
    asked = GenerationRequest(Operation.CHAT, None, objectives=RequestedObjectives(tbt_slo_ms=30.0))
    requested = caller.asks(asked).objectives
    assert requested == RequestedObjectives(ttft_slo_ms=500.0, tbt_slo_ms=30.0)
    assert LatencyObjectives(2000.0, 50.0).replaced_by(requested) == LatencyObjectives(500.0, 30.0)


def test_anthropics_clients_have_a_header_of_their_own() -> None:
    assert GUARDED.caller(Need.KEY, (("x-api-key", "baton-user"),)).tenant == "user"


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ((), "MISSING_API_KEY"),
        ((("authorization", "Basic baton-user"),), "MISSING_API_KEY"),
        ((("authorization", "Bearer "),), "MISSING_API_KEY"),
        ((("x-api-key", ""),), "MISSING_API_KEY"),
        ((("x-api-key", "baton-other"),), "INVALID_API_KEY"),
        (shown("baton-other"), "INVALID_API_KEY"),
        (shown(digest_of("baton-user").hex()), "INVALID_API_KEY"),
    ],
)
def test_other_credentials_are_rejected_without_quoting_them(
    metadata: tuple[tuple[str, str], ...], reason: str
) -> None:
    for need in (Need.KEY, Need.ADMIN):
        with pytest.raises(Unauthenticated) as refused:
            GUARDED.caller(need, metadata)
        assert refused.value.reason == reason
        assert "baton-" not in refused.value.message


def test_only_administrators_see_requests_of_others() -> None:
    assert GUARDED.caller(Need.ADMIN, shown("baton-boss")).tenant == "boss"
    with pytest.raises(PermissionDenied):
        GUARDED.caller(Need.ADMIN, shown("baton-user"))


def test_all_methods_but_health_need_a_key() -> None:
    for method in ("Check", "Watch"):
        assert GUARDED.authorise(f"/grpc.health.v1.Health/{method}", ()) == Caller()
    for path in ("/baton.v1.BatonService/Generate", "/x/y", "", "/grpc.health.v1.Healthy/Check", "health"):
        with pytest.raises(Unauthenticated):
            GUARDED.authorise(path, ())


def test_key_removed_from_the_ring_is_invalid() -> None:
    rings = [KeyRing((USER,)), KeyRing(())]
    access = Access(lambda: rings[0])
    access.caller(Need.KEY, shown("baton-user"))
    rings.pop(0)
    with pytest.raises(Unauthenticated):
        access.caller(Need.KEY, shown("baton-user"))


def test_everybody_is_allowed_without_keys_and_shares_by_the_shown_one() -> None:
    for need in Need:
        assert Access().caller(need, shown("x")) == Caller(tenant_of_key("x"))
        assert Access().caller(need, ()) == Caller()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_these_are_loopback(host: str) -> None:
    assert is_loopback(host)
    assert too_open((host,), host, has_keys=False) == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gpu.example", "localhost.example", ""])
def test_beyond_loopback_it_takes_keys_or_the_word(host: str) -> None:
    assert not is_loopback(host)
    assert "--api-keys" in too_open((host,), "127.0.0.1", has_keys=False)
    assert too_open((host,), "127.0.0.1", has_keys=True) == ""
    assert "--admin-host" in too_open(("127.0.0.1",), host, has_keys=True)
    with pytest.raises(ConfigError, match="--insecure"):
        read_config(RouterConfig, [*REDIS, f"--host={host}"])
    with pytest.raises(ConfigError, match="--insecure"):
        read_config(RouterConfig, [*REDIS, f"--admin-host={host}", "--api-key-hashes", f"a:{'ab' * 32}"])
    assert read_config(RouterConfig, [*REDIS, f"--host={host}", "--insecure"]).host == host
    assert read_config(RouterConfig, [*REDIS, f"--host={host}", "--api-key-hashes", f"a:{'ab' * 32}"]).has_keys


def test_open_ports_are_reported() -> None:
    assert "INSECURE" in warnings(("0.0.0.0",), "127.0.0.1", has_keys=False, has_tls=False)[0]
    assert "no API keys" in warnings(("127.0.0.1",), "127.0.0.1", has_keys=False, has_tls=False)[0]
    assert "--tls-cert" in warnings(("0.0.0.0",), "127.0.0.1", has_keys=True, has_tls=False)[0]
    assert warnings(("0.0.0.0",), "127.0.0.1", has_keys=True, has_tls=True) == []


def test_key_file_that_cannot_be_read_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("baton-SECRET")
    for file, told in ((tmp_path / "keys", "line 1"), (tmp_path / "none", "No such file")):
        with pytest.raises(ConfigError, match=told) as refused:
            read_config(RouterConfig, [*REDIS, "--api-keys", str(file)])
        assert "SECRET" not in str(refused.value)


def test_certificate_and_key_go_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be set together"):
        read_config(RouterConfig, [*REDIS, "--tls-cert", str(tmp_path)])


def test_key_is_a_tenant_and_is_not_kept() -> None:
    tenant = tenant_of((("x-request-id", "1"), ("authorization", "Bearer secret-key")))
    assert tenant == tenant_of((("authorization", "bearer  secret-key"),)) == tenant_of_key("secret-key")
    assert tenant != tenant_of((("authorization", "Bearer other-key"),))
    assert tenant and "secret" not in tenant


def test_without_a_key_all_are_one_tenant() -> None:
    assert tenant_of(()) == ""
    for value in ("Basic abc", "Bearer ", b"Bearer key"):
        assert tenant_of((("authorization", value),)) == ""


def test_workers_may_be_named_by_hand() -> None:
    config = read_config(RouterConfig, ["--workers", "prefill@a:1,decode@b:2", "--port", "0"])
    assert [(worker.role, worker.endpoint) for worker in config.workers] == [("prefill", "a:1"), ("decode", "b:2")]


def test_ports_have_defaults() -> None:
    config = read_config(RouterConfig, ["--redis-url", "redis://127.0.0.1:1"])
    assert (config.host, config.port, config.admin_host, config.admin_port) == ("127.0.0.1", 50051, "127.0.0.1", 50052)


def test_routers_know_one_of_an_ipv6_address_as_clients_write_it() -> None:
    config = read_config(RouterConfig, ["--workers", "decode@b:2", "--host", "fd00::1", "--insecure"])
    assert address_of(config) == "[fd00::1]:50051"


def test_address_of_a_router_with_shared_ports_is_its_admin_port() -> None:
    shared = ["--workers", "decode@b:2", "--share-ports", "--admin-port", "7"]
    assert address_of(read_config(RouterConfig, shared)) == "127.0.0.1:7"


def test_configuration_without_workers_and_registry_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"--redis-url .* or --workers"):
        read_config(RouterConfig, [])
