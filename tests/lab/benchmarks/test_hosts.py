"""Hosts in network namespaces: isolation, connections, link changes, and clean-up."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.lab.harness.hosts.network import HostNetwork, HostsUnavailable
from baton.lab.harness.hosts.reach import forwarded, socket_in
from baton.lab.harness.hosts.shaping import HostLink, drop_program, shape_lines
from tests.fixtures.hosts import needs_root
from tests.fixtures.waiting import wait_until

BOUND_S = 20.0
DELAY_MS = 20.0
SERVE = """
import socket, sys
server = socket.create_server(("::", 5000), family=socket.AF_INET6, dualstack_ipv6=True)
print("listening", flush=True)
while True:
    connection, _ = server.accept()
    connection.sendall(sys.argv[1].encode())
    connection.close()
"""


@pytest.fixture(scope="module")
def network() -> Iterator[HostNetwork]:
    with HostNetwork(("first", "second"), HostLink(delay_ms=DELAY_MS)) as network:
        yield network


@pytest.fixture(scope="module")
def answering(network: HostNetwork) -> Iterator[HostNetwork]:
    """Run a server on host `second` that answers every connection with the host's name."""
    process = start(network, "second", SERVE, "second")
    assert process.stdout is not None and process.stdout.readline() == "listening\n"
    yield network
    process.terminate()
    process.communicate(timeout=BOUND_S)


def start(network: HostNetwork, name: str, program: str, *arguments: str) -> subprocess.Popen[str]:
    command = network.command(name, [sys.executable, "-I", "-S", "-c", program, *arguments])
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def says(network: HostNetwork, name: str, program: str, *arguments: str) -> str:
    return start(network, name, program, *arguments).communicate(timeout=BOUND_S)[0].strip()


def heard(network: HostNetwork, address: str, within_s: float = 1.0) -> str:
    """Connect to port 5000 of a host from the switch and return the answer; empty if there is no connection."""
    with socket_in(network.switch_process, socket.AF_INET6 if ":" in address else socket.AF_INET) as connection:
        connection.settimeout(within_s)
        try:
            connection.connect((address, 5000))
            return connection.recv(64).decode()
        except TimeoutError:
            return ""


@needs_root
def test_no_file_memory_or_process_of_one_host_is_seen_by_another(network: HostNetwork) -> None:
    write = "import pathlib; [pathlib.Path(f'{each}/mark').touch() for each in ('/tmp', '/dev/shm')]; print('written')"
    assert says(network, "first", write) == "written"
    look = "import os; print(*os.listdir('/tmp'), *os.listdir('/dev/shm'), *filter(str.isdigit, os.listdir('/proc')))"
    seen = says(network, "second", look).split()
    assert "mark" not in seen
    assert len([each for each in seen if each.isdigit()]) <= 3  # first process, the one that lists them, server
    assert not Path("/tmp/mark").exists()


@needs_root
def test_host_changes_no_file_of_the_machine(network: HostNetwork) -> None:
    write = "import sys\ntry: open(sys.argv[1], 'w')\nexcept OSError as error: print(error.strerror)"
    assert says(network, "first", write, f"/var/{os.getpid()}") == "Read-only file system"


@needs_root
def test_all_hosts_have_one_name_and_one_boot_id(network: HostNetwork) -> None:
    look = "import socket; print(socket.gethostname(), open('/proc/sys/kernel/random/boot_id').read().strip())"
    assert says(network, "first", look) == says(network, "second", look)


@needs_root
def test_hosts_reach_each_other_by_address_and_name_in_both_families(answering: HostNetwork) -> None:
    ask = "import socket, sys; print(*(socket.create_connection((to, 5000)).recv(9).decode() for to in sys.argv[1:]))"
    ways = (answering.address("second"), answering.address6("second"), "second", answering.name6("second"))
    assert says(answering, "first", ask, *ways) == " ".join(["second"] * len(ways))


@needs_root
async def test_outside_reaches_a_host_through_a_port_of_loopback(answering: HostNetwork) -> None:
    async with forwarded(answering.switch_process, answering.address("second"), 5000) as target:
        reader, writer = await asyncio.open_connection(*target.split(":"))
        assert await reader.read() == b"second"
        writer.close()


@needs_root
def test_link_has_the_configured_delay(answering: HostNetwork) -> None:
    began_s = time.monotonic()
    assert heard(answering, answering.address("second"), BOUND_S) == "second"
    assert time.monotonic() - began_s >= 3 * DELAY_MS / 1e3  # of TCP's handshake; the answer may come with its end


@needs_root
def test_link_that_was_cut_passes_nothing_until_it_is_mended(answering: HostNetwork) -> None:
    answering.cut("second")
    assert heard(answering, answering.address("second")) == ""
    answering.mend("second")
    wait_until(lambda: heard(answering, answering.address("second")) == "second")


@needs_root
def test_drops_and_waits_of_a_link_are_counted(answering: HostNetwork) -> None:
    before = answering.counts("second")
    answering.cut("second")
    assert heard(answering, answering.address("second")) == ""
    answering.mend("second")
    assert answering.counts("second").dropped > before.dropped
    answering.shape("second", HostLink(bits_per_s=1e5, delay_ms=DELAY_MS))
    send = "import socket; out = socket.socket(type=socket.SOCK_DGRAM); "
    send += "[out.sendto(bytes(1400), ('first', 9)) for _ in range(50)]"
    assert says(answering, "second", send) == ""
    counts = answering.counts("second")
    assert counts.limited > 0 and counts.waited > 0
    answering.shape("second", HostLink(delay_ms=DELAY_MS))


@needs_root
def test_host_without_power_has_no_processes_and_boots_without_them(network: HostNetwork) -> None:
    process = start(network, "first", SERVE, "first")
    assert process.stdout is not None and process.stdout.readline() == "listening\n"
    network.power_off("first")
    assert process.wait(BOUND_S) == -signal.SIGKILL
    process.stdout.close()
    network.boot("first")
    with socket_in(network.switch_process) as connection:
        connection.settimeout(BOUND_S)
        with pytest.raises(ConnectionRefusedError):
            connection.connect((network.address("first"), 5000))


@needs_root
def test_hosts_end_with_their_creator() -> None:
    make = (
        "from baton.lab.harness.hosts.network import HostNetwork\n"
        "import sys, time\n"
        "with HostNetwork(['only']) as network:\n"
        "    print(network.first_process('only'), network.switch_process, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    maker = subprocess.Popen([sys.executable, "-c", make], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    made = [Path("/proc", pid) for pid in maker.stdout.readline().split()]
    assert len(made) == 2 and all(each.exists() for each in made)
    maker.kill()
    maker.communicate(timeout=BOUND_S)
    wait_until(lambda: not any(each.exists() for each in made))


@pytest.mark.parametrize(("missing", "named"), [("root", "need root"), ("tc", "apt install iproute2")])
def test_machine_without_namespaces_is_reported(missing: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.lab.harness.hosts.network.may_make_namespaces", lambda: missing != "root")
    monkeypatch.setattr("shutil.which", lambda program: None if program == missing else f"/usr/bin/{program}")
    with pytest.raises(HostsUnavailable, match=named):
        HostNetwork(["only"]).__enter__()


def test_rate_applies_to_sending_and_loss_to_receiving() -> None:
    rate, loss = shape_lines("eth0", HostLink(bits_per_s=1e9, loss=0.25))
    assert rate == "qdisc replace dev eth0 root tbf rate 1000000000bit burst 125000b latency 50ms"
    assert loss.startswith("filter replace dev eth0 ingress ") and f" {1 << 30}," in loss


def test_all_or_nothing_is_lost_without_a_draw() -> None:
    assert (drop_program(1.0), drop_program(0.0)) == ("1,6 0 0 2", f"1,6 0 0 {0xFFFFFFFF}")


@pytest.mark.parametrize("field", ["loss", "bits_per_s", "delay_ms"])
def test_link_that_cannot_be_is_refused_by_its_field(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is -1"):
        HostLink(**{field: -1.0})
