"""Service under test on several hosts: Redis and the routers on the first, workers on the others.

There are no proxies: faults change the hosts' links instead. Clients and the harness reach the routers through
forwarded loopback ports.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from baton.lab.chaos.faults import FIRST_HOST, spread
from baton.lab.chaos.proxy import Proxy
from baton.lab.chaos.stack import GRACE_S, HOST, WHOLE, ChaosStack, ProcessPlace
from baton.lab.chaos.watch import children_of, life_of
from baton.lab.harness.hosts.network import HostNetwork
from baton.lab.harness.hosts.reach import forwarded
from baton.lab.harness.hosts.shaping import HostLink
from baton.launch.processes import ChildProcess, LineWriter, ProcessSpec, Stage
from baton.process.registry.redis_server import NOISE, find_redis_server, free_ports, redis_command

USUAL = HostLink(delay_ms=0.0)  # 0, not None: a link created without a delay could not get one later
REDIS_PORT, ROUTER_PORT, WORKER_PORT, ADMIN_OFFSET, HTTP_OFFSET = 6379, 50_051, 50_071, 100, 200

Result = TypeVar("Result")


class HostedStack(ChaosStack):
    """Chaos stack whose processes run on several hosts, which it creates and removes."""

    def __init__(self, model: Path, folder: Path, hosts: int, worker_flags: Sequence[str] = ()) -> None:
        self.hosts = spread(hosts)
        self.network = HostNetwork(tuple(self.hosts), USUAL, visible=(model,))
        self._host_of = {name: host for host, names in self.hosts.items() for name in names}
        self._off: set[str] = set()
        self._inside: dict[int, int] = {}  # pid of the process on the host, by pid of its wrapper
        # One thread makes all changes: hosts end when the thread that created them ends.
        self._changes = ThreadPoolExecutor(1, thread_name_prefix="hosts")
        self._open = AsyncExitStack()
        self._gate_ports = iter(free_ports(2 * WHOLE.routers))
        super().__init__(model, folder, None, WHOLE, worker_flags)

    async def change(self, call: Callable[..., Result], *arguments: object) -> Result:
        """Run a blocking call that changes hosts or links, on the thread that owns the hosts, one call at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._changes, call, *arguments)

    async def start(self) -> None:
        """Start hosts and processes. Raises: OSError, RedisServerError, HostsUnavailable."""
        await self.change(self.network.__enter__)
        for number, router in enumerate(self.routers):
            there = (self.network.address(FIRST_HOST), ROUTER_PORT + number)
            admin = (HOST, ROUTER_PORT + ADMIN_OFFSET + number)
            await self._open.enter_async_context(forwarded(self.network.switch_process, *there, router.port))
            await self._open.enter_async_context(
                forwarded(self.network.first_process(FIRST_HOST), *admin, router.admin_port)
            )
        await super().start()

    async def stop(self) -> None:
        await super().stop()
        await self._open.aclose()
        await self.change(self.network.__exit__)
        self._changes.shutdown()

    async def lose(self, host: str) -> None:
        self._off.add(host)
        await self.change(self.network.power_off, host)

    async def bring_back(self, host: str) -> None:
        await self.change(self.network.boot, host)
        self._off.discard(host)

    def pids(self) -> dict[str, int]:
        """Return the pids of the processes on the hosts by name, instead of the pids of their wrapper processes."""
        return {name: inside for name, pid in super().pids().items() if (inside := self._find_inside(pid)) is not None}

    def _find_inside(self, pid: int) -> int | None:
        if pid not in self._inside:
            below = children_of(pid)
            if not below:
                return None  # the process is still starting, or has exited
            self._inside[pid] = below[0]
        inside = self._inside[pid]
        return None if life_of(inside) is None else inside

    async def _start_child(self, spec: ProcessSpec, writer: LineWriter) -> ChildProcess:
        host = self._host_of[spec.name]
        if host in self._off:
            raise OSError(f"{host} is off")
        command = self.network.command(host, spec.command)
        child = await super()._start_child(replace(spec, command=command), writer)
        self._inside.pop(child.pid, None)  # an earlier process may have had the same pid
        return child

    def _redis_place(self) -> ProcessPlace:
        return ProcessPlace("redis", REDIS_PORT, self.network.address(FIRST_HOST))

    def _worker_place(self, name: str, number: int) -> ProcessPlace:
        return ProcessPlace(name, WORKER_PORT + number, self.network.address(self._host_of[name]))

    def _router_place(self, number: int) -> ProcessPlace:
        """Return the addresses at which clients and the harness reach a router."""
        return ProcessPlace(f"router-{number}", next(self._gate_ports), HOST, next(self._gate_ports))

    def _make_proxies(self) -> dict[str, Proxy]:
        return {}

    def _redis_spec(self) -> ProcessSpec:
        command = redis_command(find_redis_server(), self.redis.port)
        command += ["--bind", self.redis.advertised_host, "--protected-mode", "no"]  # Redis uses an option's last value
        return ProcessSpec("redis", tuple(command), Stage.REDIS, GRACE_S, self._environment, noise=NOISE)

    def _worker_spec(self, place: ProcessPlace) -> ProcessSpec:
        spec = super()._worker_spec(place)
        return replace(spec, command=(*spec.command, "--host", place.advertised_host))

    def _router_spec(self, place: ProcessPlace) -> ProcessSpec:
        number = self.routers.index(place)
        arguments = ["--host", self.network.address(FIRST_HOST), "--port", ROUTER_PORT + number, "--insecure"]
        arguments += ["--admin-port", ROUTER_PORT + ADMIN_OFFSET + number]
        arguments += ["--http-port", ROUTER_PORT + HTTP_OFFSET + number, "--planner", "off"]
        return self._spec(place, "router", arguments, Stage.ROUTER)
