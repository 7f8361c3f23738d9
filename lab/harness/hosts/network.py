"""Network of hosts: creation, link changes, power-off and boot. Each call blocks for some milliseconds."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, Self

from baton import IMPORT_PATH
from baton.lab.harness.hosts.holder import OWN
from baton.lab.harness.hosts.shaping import (
    HOST_DEVICE,
    HostLink,
    bridge_lines,
    host_lines,
    port_lines,
    shape_lines,
    up_lines,
)
from baton.launch import child

FOLDER = Path(__file__).parent
HOST_NAME = "host"  # the same for every host, so that no code can depend on it
PACKAGES = {"ip": "iproute2", "tc": "iproute2", "cc": "gcc"}
STEP_S = 20.0  # timeout of one command
PLAIN = HostLink()
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21  # linux/capability.h


class HostsUnavailable(Exception):
    """Error: this machine or user cannot create hosts; the message says what is missing."""


def may_make_namespaces() -> bool:
    """Return whether this process has the rights of root that namespaces need; root of a container often lacks them."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    effective = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), 16)
    return all(effective >> capability & 1 for capability in (CAP_NET_ADMIN, CAP_SYS_ADMIN))


def hindrance() -> str:
    """Return what HostNetwork lacks on this machine; empty if nothing."""
    if not may_make_namespaces():
        return "hosts of their own need root on Linux, to make namespaces (CAP_SYS_ADMIN, CAP_NET_ADMIN)"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"{program} is not installed; on Debian: apt install {PACKAGES[program]}"
    return ""


@dataclass(slots=True)
class _Host:
    """Host in its namespaces. `first`: pid of its first process; when that exits, the kernel kills all others."""

    holder: subprocess.Popen[str]
    first: int
    relay: subprocess.Popen[str] | None = None


class LinkCounts(NamedTuple):
    dropped: int  # packets dropped by loss or a cut
    limited: int  # packets sent under a rate limit
    waited: int  # waits for the rate limit


class HostNetwork:
    """Hosts in network namespaces; they exist while the object is entered.

    The switch is a namespace with the bridge that joins all hosts; connections from outside start there. `visible`:
    more paths of /tmp or /dev/shm that hosts can read.
    """

    def __init__(self, names: Sequence[str], link: HostLink = PLAIN, visible: Sequence[Path] = ()) -> None:
        self.names = tuple(names)
        self._links = dict.fromkeys(self.names, link)
        self._cut: set[str] = set()
        ours = (IMPORT_PATH.parent, Path(sys.prefix), Path(sys.base_prefix))
        self._visible = [str(path) for path in (*ours, *visible) if any(path.is_relative_to(own) for own in OWN)]
        self._hosts: dict[str, _Host] = {}
        self._stack = ExitStack()
        self._switch: _Host | None = None
        self._relay = Path()

    def __enter__(self) -> Self:
        """Create the network. Raises: HostsUnavailable."""
        if missing := hindrance():
            raise HostsUnavailable(missing)
        with ExitStack() as stack:
            if any(link.delay_ms is not None for link in self._links.values()):
                scratch = Path(stack.enter_context(TemporaryDirectory(prefix="baton-hosts-")))
                self._relay = _compiled(FOLDER / "delay.c", scratch)
            self._switch = self._hold()
            stack.callback(self._end, self._switch)
            _batch(self._switch, "ip", bridge_lines("10.77.0.1", "fd77::1"))
            stack.callback(self._end_all)
            for name in self.names:
                self.boot(name)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def address(self, name: str) -> str:
        return f"10.77.0.{2 + self.names.index(name)}"

    def address6(self, name: str) -> str:
        return f"fd77::{2 + self.names.index(name):x}"

    def name6(self, name: str) -> str:
        """Return the host's name for its IPv6 address; its plain name resolves to the IPv4 address."""
        return f"{name}-six"

    def first_process(self, name: str) -> int:
        """Return the PID of a host's first process outside the host; `/proc/PID/net/tcp` lists the host's sockets."""
        return self._hosts[name].first

    @property
    def switch_process(self) -> int:
        """PID of the switch's first process; from there all hosts are reachable."""
        return _running(self._switch).first

    def command(self, name: str, command: Sequence[object]) -> tuple[str, ...]:
        """Return a command that runs `command` on the host, forwards signals to it and exits with its status."""
        program = str(FOLDER / "inside.py")
        return (sys.executable, "-I", "-S", program, str(self.first_process(name)), *map(str, command))

    def shape(self, name: str, link: HostLink) -> None:
        """Change the link of a host, for open connections too."""
        relay = self._hosts[name].relay if name in self._hosts else None
        if (link.delay_ms is None) != (self._links[name].delay_ms is None):
            raise ValueError(f"{name}: a delay can only be changed if the link was created with one")
        self._links[name] = link
        if relay is not None and relay.stdin is not None:
            relay.stdin.write(f"{1000 * (link.delay_ms or 0):.0f}\n")
            relay.stdin.flush()
        self._apply(name)

    def counts(self, name: str) -> LinkCounts:
        """Return the packet counts of both ends of a host's link. `shape` resets the counts of the rate limit."""
        ends = ((_running(self._switch), self._device(name)), (self._hosts[name], HOST_DEVICE))
        found = [each for host, device in ends for each in json.loads(_tc_shows(host, device))]
        dropped = sum(each["drops"] for each in found if each["kind"] == "clsact")
        limited = [each for each in found if each["kind"] == "tbf"]
        sent, waited = (sum(each[what] for each in limited) for what in ("packets", "overlimits"))
        return LinkCounts(dropped, sent, waited)

    def cut(self, name: str) -> None:
        """Drop all packets of a host. Neither side notices: no carrier is lost and no connection reset."""
        self._cut.add(name)
        self._apply(name)

    def mend(self, name: str) -> None:
        self._cut.discard(name)
        self._apply(name)

    def power_off(self, name: str) -> None:
        """Kill the host with all its processes, without a packet to other hosts."""
        self.cut(name)
        host = self._hosts.pop(name)
        self._end(host)
        if host.relay is None:
            _batch(_running(self._switch), "ip", [f"link delete dev {self._device(name)}"])

    def boot(self, name: str) -> None:
        """Boot a host that is off: same address and link, no processes."""
        if name in self._hosts:
            raise ValueError(f"{name} is running")
        switch, device, host = _running(self._switch), self._device(name), self._hold()
        self._hosts[name] = host
        if self._links[name].delay_ms is None:
            ends = f"name {device} type veth peer name {HOST_DEVICE} netns {host.first}"
            _batch(switch, "ip", [f"link add {ends}"])
        else:
            host.relay = self._start_relay(host.first, switch.first, device)
        _batch(host, "ip", host_lines(self.names.index(name), self.address(name), self.address6(name)))
        _batch(switch, "ip", port_lines(device))
        _batch(host, "tc", up_lines(HOST_DEVICE))
        _batch(switch, "tc", up_lines(device))
        self._cut.discard(name)
        self.shape(name, self._links[name])

    def _device(self, name: str) -> str:
        return f"host{self.names.index(name)}"

    def _apply(self, name: str) -> None:
        link = replace(self._links[name], loss=1.0) if name in self._cut else self._links[name]
        _batch(_running(self._switch), "tc", shape_lines(self._device(name), link))
        if name in self._hosts:
            _batch(self._hosts[name], "tc", shape_lines(HOST_DEVICE, link))

    def _hold(self) -> _Host:
        """Start the switch. Raises: HostsUnavailable."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for name in self.names:
            lines += [f"{self.address(name)} {name}", f"{self.address6(name)} {self.name6(name)}"]
        program = ("holder.py", HOST_NAME, "".join(f"{line}\n" for line in lines), *self._visible)
        holder = _start([sys.executable, "-I", "-S", str(FOLDER / program[0]), *program[1:]])
        return _Host(holder, int(_first_line(holder)))

    def _start_relay(self, host: int, switch: int, device: str) -> subprocess.Popen[str]:
        ends = (f"/proc/{host}/ns/net", HOST_DEVICE, f"/proc/{switch}/ns/net", device)
        relay = _start([str(self._relay), *ends])
        _first_line(relay)
        return relay

    def _end_all(self) -> None:
        for host in self._hosts.values():
            self._end(host)
        self._hosts.clear()

    def _end(self, host: _Host) -> None:
        os.kill(host.first, signal.SIGKILL)  # the PID cannot have been reused: its parent has not waited for it
        for process in (host.holder, host.relay):
            if process is not None:
                if process is host.relay:
                    process.kill()
                process.wait(STEP_S)
                for pipe in (process.stdin, process.stdout, process.stderr):
                    if pipe is not None:
                        pipe.close()


def _running(host: _Host | None) -> _Host:
    if host is None:
        raise RuntimeError("the network has not been entered: use it in a `with` statement")
    return host


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a process that is killed when the calling thread ends."""
    dying_with_us = (sys.executable, "-I", "-S", child.__file__, str(os.getpid()), "")
    pipe = subprocess.PIPE
    return subprocess.Popen((*dying_with_us, *command), stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def _first_line(process: subprocess.Popen[str]) -> str:
    """Return the first line of output. Raises: HostsUnavailable if the process ends without one."""
    line = process.stdout.readline() if process.stdout is not None else ""
    if not line:
        said = process.communicate(timeout=STEP_S)[1].strip()
        raise HostsUnavailable(said.splitlines()[-1] if said else f"{process.args!r} ended")
    return line


def _batch(host: _Host, program: str, lines: Sequence[str]) -> None:
    """Run lines of `ip` or `tc` in the network of a host. Raises: HostsUnavailable."""
    command = ("nsenter", f"--net=/proc/{host.first}/ns/net", program, "-batch", "-")
    text = "".join(f"{line}\n" for line in lines)
    result = subprocess.run(command, input=text, capture_output=True, text=True, timeout=STEP_S, check=False)
    if result.returncode:
        raise HostsUnavailable(f"{program} failed: {result.stderr.strip()}; commands: {'; '.join(lines)}")


def _tc_shows(host: _Host, device: str) -> str:
    """Return the queueing disciplines of a device as JSON. Raises: HostsUnavailable."""
    command = ("nsenter", f"--net=/proc/{host.first}/ns/net", "tc", "-s", "-j", "qdisc", "show", "dev", device)
    result = subprocess.run(command, capture_output=True, text=True, timeout=STEP_S, check=False)
    if result.returncode:
        raise HostsUnavailable(f"tc: {result.stderr.strip()}")
    return result.stdout


def _compiled(source: Path, folder: Path) -> Path:
    """Compile a helper. Raises: HostsUnavailable."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise HostsUnavailable(f"links with a delay need a C compiler; on Debian: apt install {PACKAGES['cc']}")
    program = folder / source.stem
    command = (compiler, "-O2", "-Wall", "-o", str(program), str(source))
    result = subprocess.run(command, capture_output=True, text=True, timeout=3 * STEP_S, check=False)
    if result.returncode:
        raise HostsUnavailable(f"{source.name} does not compile: {result.stderr.strip()}")
    return program
