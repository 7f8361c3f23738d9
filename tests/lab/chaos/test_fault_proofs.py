"""Every injection proves that it had an effect, here on processes of the test; one without effect is noticed."""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.lab.chaos import injection
from baton.lab.chaos import injection as corruption
from baton.lab.chaos.faults import Fault, FaultKind
from baton.lab.chaos.injection import (
    CutConnections,
    FlippedOnTheWay,
    Flushed,
    NotMade,
    NotProven,
    Ruled,
    Scene,
    Signalled,
    Stopped,
    injection_of,
)
from baton.lab.chaos.proxy import LinkWay, Proxy, Rule
from baton.lab.chaos.stack import ProcessPlace, make_wall_clock
from baton.lab.chaos.watch import Life, is_alive, life_of, pool_range, read_memory, state_of
from baton.process.registry.redis_server import start_redis_server
from tests.fixtures.session_client import WAIT_S, eventually

POOL_OWNER = """
import mmap, os, sys, time
fd = os.memfd_create("baton-kv-pool")
os.ftruncate(fd, 4096 * 4)
pool = mmap.mmap(fd, 4096 * 4)
sys.stdout.write("ready\\n"); sys.stdout.flush()
time.sleep(60)
"""


@dataclass
class OneProcess:
    """Stack with one process that gets signals. `deaf`: signals are not sent, like by a broken injector."""

    deaf: bool = False

    def send(self, life: Life, number: signal.Signals) -> None:
        if not self.deaf and is_alive(life):
            os.kill(life.pid, number)


@pytest.fixture
def short_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the wait for effects that do not come."""
    monkeypatch.setattr(injection, "PROOF_S", 0.3)
    monkeypatch.setattr(injection, "MADE_S", 0.3)


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injection, "PROOF_S", WAIT_S)
    monkeypatch.setattr(injection, "MADE_S", WAIT_S)
    for name in ("UNREAD_S", "READ_S", "PAUSE_S"):
        monkeypatch.setattr(corruption, name, 0.05)


@pytest.fixture
async def life() -> AsyncIterator[Life]:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", POOL_OWNER, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    assert await child.stdout.readline() == b"ready\n"
    found = life_of(child.pid)
    assert found is not None
    yield found
    if child.returncode is None:
        child.kill()
    await child.wait()


async def test_kill_is_proved_by_the_end_of_that_very_process(life: Life) -> None:
    kill = Signalled(OneProcess(), life, signal.SIGKILL)  # type: ignore[arg-type]
    await kill.inject()
    assert "gone" in await kill.prove()
    assert not is_alive(life)


async def test_stop_is_proved_by_the_state_and_undone(life: Life) -> None:
    stop = Stopped(OneProcess(), life, 0.0)  # type: ignore[arg-type]
    await stop.inject()
    assert "state T" in await stop.prove()
    await stop.heal()
    await eventually(lambda: state_of(life.pid) != "T")


@pytest.mark.usefixtures("short_proof")
@pytest.mark.parametrize("kind", ["kill", "stop"])
async def test_injector_that_does_nothing_is_found_out(life: Life, kind: str) -> None:
    deaf = OneProcess(deaf=True)
    broken = Signalled(deaf, life, signal.SIGKILL) if kind == "kill" else Stopped(deaf, life, 0.0)  # type: ignore[arg-type]
    await broken.inject()
    with pytest.raises(NotProven):
        await broken.prove()


@dataclass
class Transfers(OneProcess):
    """Stack with one source of KV. `notices`: whether its reader checks what it reads."""

    source: Life | None = None
    mismatches: int = 0
    notices: bool = True
    unread: int = 3
    workers: tuple[ProcessPlace, ...] = (ProcessPlace("decode-0", 1, ""),)

    def life(self, name: str) -> Life | None:
        return self.source

    async def statuses(self) -> list[object]:
        pages = SimpleNamespace(held_by_transfers=self.unread)
        load = SimpleNamespace(pages=pages, checksum_mismatches=self.mismatches)
        self.mismatches += self.notices
        return [SimpleNamespace(workers=[SimpleNamespace(worker_id="prefill-0", load=load)])]


async def test_bits_on_their_way_are_turned_over_found_out_and_turned_back(life: Life) -> None:
    pool = pool_range(life.pid)
    assert pool is not None
    before = read_memory(life.pid, pool.start, len(pool))
    flip = FlippedOnTheWay(Transfers(source=life), "prefill-0", random.Random(1))  # type: ignore[arg-type]
    await flip.inject()
    assert f"{len(pool) // 4096} bits flipped" in await flip.prove()
    assert read_memory(life.pid, pool.start, len(pool)) == before
    assert state_of(life.pid) != "T"


async def test_unread_bits_are_not_flipped(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corruption, "TRIES", 2)
    asked: list[int] = []
    stack = Transfers(source=life, unread=0)
    flip = FlippedOnTheWay(stack, "prefill-0", random.Random(1), asked.append)  # type: ignore[arg-type]
    with pytest.raises(NotMade, match="no transfer"):
        await flip.inject()
    assert asked == [corruption.PROMPTS] * 2


async def test_undetected_bit_flips_are_no_proof(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corruption, "NOTICED_S", 0.1)
    monkeypatch.setattr(corruption, "PROOF_S", 0.1)
    monkeypatch.setattr(corruption, "TRIES", 1)
    flip = FlippedOnTheWay(Transfers(source=life, notices=False), "prefill-0", random.Random(1))  # type: ignore[arg-type]
    await flip.inject()
    with pytest.raises(NotProven, match="no reader"):
        await flip.prove()


async def test_source_that_another_fault_ended_meanwhile_was_not_hit(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> bytes:
        os.kill(life.pid, signal.SIGKILL)
        while is_alive(life):
            pass
        raise FileNotFoundError(f"/proc/{life.pid}/mem")

    monkeypatch.setattr(corruption, "read_memory", ended)
    flip = FlippedOnTheWay(Transfers(source=life), "prefill-0", random.Random(1))  # type: ignore[arg-type]
    with pytest.raises(NotMade, match="another fault ended prefill-0"):
        await flip.inject()


async def test_unchanged_bits_are_no_proof(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corruption, "write_memory", lambda *_: None)
    monkeypatch.setattr(corruption, "TRIES", 1)
    flip = FlippedOnTheWay(Transfers(source=life), "prefill-0", random.Random(1))  # type: ignore[arg-type]
    await flip.inject()
    with pytest.raises(NotProven, match="no bit of a block"):
        await flip.prove()


async def test_flush_is_proved_by_the_keys_that_are_gone() -> None:
    server = start_redis_server()
    try:
        port = int(server.url.rpartition(":")[2].partition("/")[0])
        await injection.redis_says(port, [b"SET a 1", b"SET b 2"])
        flush = Flushed(port)
        await flush.inject()
        assert await flush.prove() == "2 keys before, none after"
    finally:
        server.stop()
    with pytest.raises(NotProven):
        await flush.inject()


@pytest.mark.usefixtures("short_proof")
async def test_cut_and_a_partition_where_nothing_flows_were_not_made() -> None:
    proxy = Proxy(("127.0.1.9", 1), ("127.0.0.1", 1), lambda _: None)
    with pytest.raises(NotMade):
        await CutConnections(proxy, "router-0").inject()
    rule = Rule(held=frozenset(LinkWay))
    partition = Ruled([(proxy, "router-0")], rule, 0.0, lambda counts: counts.held, "held")
    await partition.inject()
    with pytest.raises(NotMade):
        await partition.prove()


@pytest.mark.usefixtures("short_proof")
@pytest.mark.parametrize("way", list(LinkWay))
async def test_partition_through_which_something_passes_is_found_out(way: LinkWay) -> None:
    proxy = Proxy(("127.0.1.9", 1), ("127.0.0.1", 1), lambda _: None)
    partition = Ruled([(proxy, "router-0")], Rule(held=frozenset({way})), 0.0, lambda counts: counts.held, "held")
    await partition.inject()
    proxy.counts("router-0").there += way is LinkWay.THERE
    proxy.counts("router-0").back += way is LinkWay.BACK
    with pytest.raises(NotProven, match="1 chunks passed"):
        await partition.prove()


@pytest.mark.usefixtures("short_proof")
async def test_traffic_of_the_open_direction_is_no_proof_of_a_one_way_partition() -> None:
    proxy = Proxy(("127.0.1.9", 1), ("127.0.0.1", 1), lambda _: None)
    partition = Ruled(
        [(proxy, "router-0")], Rule(held=frozenset({LinkWay.BACK})), 0.0, lambda counts: counts.held, "held"
    )
    await partition.inject()
    proxy.counts("router-0").there += 1
    with pytest.raises(NotMade):
        await partition.prove()


async def test_wall_clock_of_a_process_jumps_and_its_monotonic_one_does_not(tmp_path: Path) -> None:
    clock = make_wall_clock(tmp_path)
    assert clock is not None, "needs a C compiler; on Debian: apt install gcc"
    told = "import time, sys; sys.stdout.write(f'{time.time()} {time.monotonic()}')"
    clock.jump(3600)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-c", told, stdout=asyncio.subprocess.PIPE, env={**os.environ, **clock.environment}
    )
    output, _ = await child.communicate()
    wall, steady = map(float, output.split())
    assert 3500 < wall - time.time() < 3700  # noqa: TID251
    assert abs(steady - time.monotonic()) < 60
    assert clock.wrong_reads > 0
    clock.close()


async def test_clock_without_a_shim_is_no_fault() -> None:
    with pytest.raises(NotMade):
        injection_of(Fault(FaultKind.CLOCK, "", amount=5), Scene(OneProcess(), None, random.Random(1)))  # type: ignore[arg-type]
