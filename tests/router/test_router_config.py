"""Configuration of the router."""

import pytest

from baton.process.config import ConfigError, read_config
from baton.router.config import RouterConfig
from baton.router.process import address_of


def test_workers_may_be_named_by_hand() -> None:
    config = read_config(RouterConfig, ["--workers", "prefill@a:1,decode@b:2", "--port", "0"])
    assert [(worker.role, worker.endpoint) for worker in config.workers] == [("prefill", "a:1"), ("decode", "b:2")]


def test_the_ports_have_defaults() -> None:
    config = read_config(RouterConfig, ["--redis-url", "redis://127.0.0.1:1"])
    assert (config.host, config.port, config.admin_host, config.admin_port) == ("127.0.0.1", 50051, "127.0.0.1", 50052)


def test_routers_know_one_of_an_ipv6_address_as_clients_write_it() -> None:
    config = read_config(RouterConfig, ["--workers", "decode@b:2", "--host", "fd00::1", "--insecure"])
    assert address_of(config) == "[fd00::1]:50051"


def test_without_workers_and_registry_it_says_what_to_give() -> None:
    with pytest.raises(ConfigError, match=r"--redis-url .* or --workers"):
        read_config(RouterConfig, [])
