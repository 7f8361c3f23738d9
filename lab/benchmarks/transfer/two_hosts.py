"""Two hosts on one machine: network namespaces joined by a link, whose rate the kernel limits. Linux, as root."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

LATENCY_MS = 10  # of a packet in the limiter's queue, at most
LEAST_BURST_BYTES = 256 << 10  # the kernel hands on up to 64 KiB at once
BURST_S = 0.001


@dataclass(frozen=True, slots=True)
class Host:
    namespace: str
    address: str

    def command(self, *command: object) -> list[str]:
        """The command that runs that one there."""
        return ["ip", "netns", "exec", self.namespace, *map(str, command)]


@contextmanager
def two_hosts(gbit_per_s: float | None) -> Iterator[tuple[Host, Host]]:
    """None: as fast as the machine is. Raises: subprocess.CalledProcessError, without root or iproute2."""
    names = [f"baton-{side}-{os.getpid()}" for side in ("left", "right")]
    hosts = (Host(names[0], "10.98.0.1"), Host(names[1], "10.98.0.2"))
    with ExitStack() as undo:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
            undo.callback(_run, "ip", "netns", "del", host.namespace)  # and with it its end of the link
            _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
        peer = ("peer", "name", "wire", "netns", hosts[1].namespace)
        _run("ip", "link", "add", "wire", "netns", hosts[0].namespace, "type", "veth", *peer)
        for host in hosts:
            _run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "wire")
            _run("ip", "-n", host.namespace, "link", "set", "wire", "up")
            if gbit_per_s is not None:
                _run("tc", "-n", host.namespace, "qdisc", "add", "dev", "wire", "root", *_limit(gbit_per_s))
        yield hosts


def _limit(gbit_per_s: float) -> Sequence[str]:
    burst = max(LEAST_BURST_BYTES, int(gbit_per_s * 1e9 / 8 * BURST_S))
    return ("tbf", "rate", f"{gbit_per_s:g}gbit", "burst", f"{burst}b", "latency", f"{LATENCY_MS}ms")


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
