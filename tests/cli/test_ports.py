"""The ports of `baton up`: one sentence before anything starts, for pairs that collide and for ports in use."""

import os
import socket
from itertools import combinations

import pytest
from typer.testing import CliRunner

from baton.cli.__main__ import app
from baton.launch import CommandFailed
from baton.launch.ports import PortTaken, RouterPorts, check_ports, claimed, plan_ports, reserved
from baton.launch.process_plan import router_addresses
from baton.process.registry.redis_server import free_port, free_ports
from baton.process.serving.addresses import Address, ListenError, address_of_url, check_free


def up(*flags: str, **variables: str) -> str:
    """What the command fails with."""
    failed = CliRunner().invoke(app, ["up", *flags], env=variables)
    assert isinstance(failed.exception, CommandFailed), failed.output
    assert "\n" not in str(failed.exception)
    return str(failed.exception)


@pytest.mark.parametrize(("first", "second"), combinations(["--port", "--admin-port", "--http-port"], 2))
def test_up_two_options_with_one_port_fails_with_both_named(first: str, second: str) -> None:
    ports = dict(zip(("--port", "--admin-port", "--http-port"), map(str, free_ports(3)), strict=True))
    ports[second] = ports[first]
    failure = up(*(part for pair in ports.items() for part in pair))
    assert first in failure and second in failure and ports[first] in failure


def test_up_http_port_equal_to_default_admin_port_fails_with_both_named() -> None:
    port = free_port()
    failure = up("--port", str(port), "--http-port", str(port + 1))
    assert "--admin-port" in failure and "--http-port" in failure


def test_up_ports_of_a_second_router_collide_with_http() -> None:
    port = free_port()
    failure = up("--port", str(port), "--http-port", str(port + 2), "--routers", "2", "--device", "cpu")
    assert "router 2's admin port" in failure and "--http-port" in failure


@pytest.mark.parametrize(
    ("variable", "url"),
    [("REDIS_URL", "redis://127.0.0.1:{}/0"), ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:{}")],
)
def test_up_port_of_a_server_that_it_connects_to_fails(variable: str, url: str) -> None:
    port = free_port()
    assert str(port) in up("--port", str(port), **{variable: url.format(port)})


@pytest.mark.parametrize("option", ["--port", "--admin-port", "--http-port"])
def test_up_port_in_use_names_the_process_that_listens(option: str, listening: int) -> None:
    ports = dict(zip(("--port", "--admin-port", "--http-port"), map(str, free_ports(3)), strict=True))
    ports[option] = str(listening)
    failure = up(*(part for pair in ports.items() for part in pair))
    assert f"cannot listen on {option} 127.0.0.1:{listening}: the port is in use by pid {os.getpid()} (" in failure


def test_up_ports_beyond_the_last_are_refused() -> None:
    assert "65536" in up("--port", "65534", "--routers", "2", "--http-port", "0")


def test_port_plan_gives_all_routers_one_address_and_each_an_admin_and_a_metrics_port() -> None:
    planned = plan_ports(3, 50051, None, None, lambda port: True)
    assert {(each.public, each.http) for each in planned} == {(50051, 8000)}
    assert [(each.admin, each.metrics) for each in planned] == [(50052, 8001), (50053, 8002), (50054, 8003)]


def test_port_plan_of_one_router_has_no_metrics_port() -> None:
    assert plan_ports(1, 50051, None, 9000, lambda port: True) == (RouterPorts(50051, 50052, 9000),)
    assert plan_ports(1, 50051, 7, 9000, lambda port: True) == (RouterPorts(50051, 7, 9000),)


def test_port_plan_replaces_default_http_port_in_use() -> None:
    [in_use] = plan_ports(1, 50051, None, None, lambda port: False)
    [promised] = plan_ports(1, 8000, None, None, lambda port: True)
    beyond = plan_ports(2, 50051, None, None, lambda port: port != 8002)
    assert 8000 not in (in_use.http, promised.http, *(each.http for each in beyond))


def test_port_plan_with_zeros_has_distinct_free_ports() -> None:
    planned = plan_ports(4, 0, None, 0, lambda port: True)
    own = [port for each in planned for port in (each.admin, each.metrics)]
    assert len({planned[0].public, planned[0].http, *own}) == 10
    assert {(each.public, each.http) for each in planned} == {(planned[0].public, planned[0].http)}


def test_reserved_port_is_open_only_to_processes_that_share_it() -> None:
    address = Address("--port", "127.0.0.1", free_port())
    with reserved([address]):
        check_free(address, shared=True)
        with pytest.raises(ListenError, match="in use"):
            check_free(address)
        with socket.socket() as foreign:
            foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                foreign.bind((address.host, address.port))
                foreign.listen()
    check_free(address)


def test_reservation_of_a_port_that_a_foreign_process_shares_is_refused() -> None:
    with socket.socket() as foreign:
        foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        port = foreign.getsockname()[1]
        refused = pytest.raises(PortTaken, match=f"127.0.0.1:{port}: the port is in use by pid {os.getpid()}")
        with refused, reserved([Address("--port", "127.0.0.1", port)]):
            pass


def test_ports_of_remote_servers_do_not_collide() -> None:
    public, admin, http = free_ports(3)
    addresses = router_addresses("127.0.0.1", [RouterPorts(public, admin, http)])
    check_ports(addresses, [address_of_url("--redis-url", f"redis://db:{public}")])


def test_claim_of_a_port_refuses_a_second_run_and_names_the_first() -> None:
    first, second, other = free_ports(3)
    with claimed((first, second)):
        refused = pytest.raises(PortTaken, match=rf"another `baton up` \(pid {os.getpid()}\) uses port {second}")
        with refused, claimed((other, second)):
            pass
        with claimed((other,)):  # released by the refused claim
            pass
    with claimed((first, second)):
        pass
