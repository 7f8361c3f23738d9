"""Nothing listens that was not meant to, and nothing beyond loopback."""

import re
import socket
import struct
from pathlib import Path

from tests.e2e.stack import Stack

LISTEN = "0A"


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses (host, port) on which a process accepts TCP connections, from /proc."""
    links = (str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir())
    inodes = {match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTEN and rest[5] in inodes:
                address, port = local.split(":")
                words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
                host = socket.inet_ntop(family, struct.pack(f"<{len(words)}I", *words))
                found.add((host.removeprefix("::ffff:"), int(port, 16)))  # gRPC binds IPv4 through IPv6 sockets
    return found


def test_each_process_listens_on_its_own_loopback_ports_only(stack: Stack) -> None:
    for name, process in stack.processes.items():
        flags = dict(zip(process.command[3::2], process.command[4::2], strict=True))
        expected = {int(flags["--port"])} | ({stack.admin_port, stack.http_port} if name == "router" else set())
        addresses = listening(process.pid)
        assert {host for host, _ in addresses} == {"127.0.0.1"}, name
        others = {port for _, port in addresses} - expected
        assert len(others) == (name != "router"), name  # a worker's port for KV over tcp
        assert len(addresses) == len(expected) + len(others), name
