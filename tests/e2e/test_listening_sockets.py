"""Processes listen on their documented ports only, and only on loopback."""

from tests.e2e.stack import Stack
from tests.fixtures.sockets import listening


def test_each_process_listens_only_on_its_loopback_ports(stack: Stack) -> None:
    for name, process in stack.processes.items():
        flags = dict(zip(process.command[3::2], process.command[4::2], strict=True))
        expected = {int(flags["--port"])} | ({stack.admin_port, stack.http_port} if name == "router" else set())
        addresses = listening(process.pid)
        assert {host for host, _ in addresses} == {"127.0.0.1"}, name
        others = {port for _, port in addresses} - expected
        assert len(others) == (name != "router"), name  # a worker's port for KV over TCP
        assert len(addresses) == len(expected) + len(others), name
