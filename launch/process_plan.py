"""Commands and environments of all processes of a service on one machine. Pure."""

import os
import secrets
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from baton import child_environment
from baton.launch import CommandFailed
from baton.launch.devices import CorePlan, Machine, plan_cores, write_cores
from baton.launch.ports import LOOPBACK, RouterPorts
from baton.launch.processes import ProcessSpec, Stage
from baton.process.config import flags_for, variable_of
from baton.process.registry.redis_server import (
    CONFIGURED_BY_STDIN,
    NOISE,
    RedisServerError,
    find_redis_server,
    free_port,
    password_configuration,
    redis_command,
    redis_url,
)
from baton.process.registry.redis_url import without_password
from baton.process.serving.addresses import Address
from baton.worker.config import NEED_INTERFACE

NOTHING: Mapping[str, str] = MappingProxyType({})

# Seconds between the end of a process's drain and SIGKILL.
ROUTER_END_S = 10.0
WORKER_END_S = 5.0
REDIS_GRACE_S = 5.0
PREFILL_NICE = 5  # nice value of a prefill worker on the router's core, so that the router runs first
# Share of a GPU's multiprocessors for a prefill worker that shares the GPU with a decode worker: the rest is left to
# decode steps. It needs CUDA's MPS daemon (nvidia-cuda-mps-control -d); without it, the processes use the GPU in turn.
PREFILL_GPU_PERCENT = 75
LOOPBACK_INTERFACE = "lo"
PASSWORD_BYTES = 16
GPU_CHUNK_TOKENS = 4096  # prompt tokens per step; with fewer, a GPU would wait for memory and the host

Values = Mapping[str, Any]
"""Values of configuration fields by name; None: the process uses its default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceLayout:
    """Decisions of `baton up`: devices, numbers of processes and ports."""

    machine: Machine
    prefill: int
    decode: int
    host: str
    ports: tuple[RouterPorts, ...]  # one entry per router
    core_use: Path  # folder in which CPU workers mark whether their cores compute
    redis_url: str = field(repr=False)  # URL with password
    secret: str = field(default="", repr=False)  # cluster secret of the run; empty without one
    run_id: str = ""
    drain_s: float
    router: Values  # configuration fields of every router
    worker: Values  # configuration fields of every worker

    @property
    def target(self) -> str:
        """Return host:port of all routers, for clients on this machine."""
        host = LOOPBACK if self.host in ("0.0.0.0", "::") else self.host
        return f"[{host}]:{self.ports[0].public}" if ":" in host else f"{host}:{self.ports[0].public}"

    @property
    def admin_targets(self) -> tuple[str, ...]:
        return tuple(f"{LOOPBACK}:{each.admin}" for each in self.ports)

    @property
    def tensor_parallel(self) -> int:
        return int(self.worker["tensor_parallel"])

    def device(self, position: int) -> str:
        """Return the first device of the worker at `position`, counted over all workers, decode workers first."""
        return self.machine.device(position, self.tensor_parallel)


def plan_processes(layout: ServiceLayout, surroundings: Mapping[str, str], options: Set[str]) -> list[ProcessSpec]:
    """Return the specs of routers and workers, without Redis. `surroundings`: environment of `baton up`; `options`:
    names of its options, as configuration fields.

    Raises: CommandFailed.
    """
    on_cpu = not layout.machine.gpu_free_bytes
    counts = layout.prefill, layout.decode, len(layout.ports)
    cores = plan_cores(layout.machine.cores, *counts) if on_cpu else None

    def process(name: str, values: Values, added: Mapping[str, str] = NOTHING) -> ProcessSpec:
        is_router = "role" not in values
        module, stage = ("router", Stage.ROUTER) if is_router else ("elastic_worker", Stage.WORKER)
        return ProcessSpec(
            name,
            (sys.executable, "-P", "-m", f"baton.{module}", *flags_for(values)),
            stage,
            layout.drain_s + (ROUTER_END_S if is_router else WORKER_END_S),
            {**_environment_of(name, values, surroundings, options), **_own_variables(layout), **added},
        )

    routers = [
        process(f"router-{number}" if number else "router", _router(layout, cores, ports))
        for number, ports in enumerate(layout.ports)
    ]
    prefill = [
        process(f"prefill-{number}", _prefill_worker(layout, cores, number), _prefill_variables(layout, cores, number))
        for number in range(layout.prefill)
    ]
    decode = [
        process(
            f"decode-{number}",
            _worker(layout, "decode", number, number, cores),
            _threads(cores.decode[number]) if cores else NOTHING,
        )
        for number in range(layout.decode)
    ]
    return [*routers, *prefill, *decode]


def public_addresses(host: str, ports: Sequence[RouterPorts]) -> list[Address]:
    """Return the addresses of all routers together."""
    return [Address("--port", host, ports[0].public), Address("--http-port", host, ports[0].http)]


def router_addresses(host: str, ports: Sequence[RouterPorts]) -> list[Address]:
    """Return all addresses on which the routers listen."""
    found = public_addresses(host, ports)
    for number, each in enumerate(ports, 1):
        found.append(Address(f"router {number}'s admin port" if number > 1 else "--admin-port", LOOPBACK, each.admin))
        if each.metrics is not None:
            found.append(Address(f"router {number}'s metrics port", host, each.metrics))
    return found


def _router(layout: ServiceLayout, cores: CorePlan | None, ports: RouterPorts) -> Values:
    own = {"host": layout.host, "port": ports.public, "admin_port": ports.admin}
    own |= {"http_host": layout.host, "http_port": ports.http}
    if ports.metrics is not None:
        own |= {"share_ports": True, "metrics_port": ports.metrics}
    return {**own, **layout.router, "cores": write_cores(cores.router) if cores else None}


def _worker(layout: ServiceLayout, role: str, number: int, position: int, cores: CorePlan | None) -> dict[str, Any]:
    name = f"{role}-{number}"
    own = {"role": role, "worker_id": name, "host": LOOPBACK, "port": 0, "device": layout.device(position)}
    values = {**own, **layout.worker}
    if values["transport"] in NEED_INTERFACE:
        values["transfer_interface"] = LOOPBACK_INTERFACE
    if cores is None:
        values["chunk_tokens"] = GPU_CHUNK_TOKENS
    else:
        own_cores = (cores.decode if role == "decode" else cores.prefill)[number]
        values |= {"cores": write_cores(own_cores), "transfer_cores": write_cores(cores.transfer)}
        values["core_use"] = layout.core_use / name
    if values["kv_memory"] is None:
        share = layout.machine.gpu_share(layout.prefill + layout.decode, layout.tensor_parallel)
        values |= {"kv_memory": "auto", "gpu_memory_utilization": f"{share:.3f}"}
    return values


def _prefill_worker(layout: ServiceLayout, cores: CorePlan | None, number: int) -> Values:
    values = _worker(layout, "prefill", number, layout.decode + number, cores)
    if cores:
        own = cores.prefill[number]
        if number < layout.decode and not set(own) & set(cores.decode[number]):
            values["spare_cores"] = write_cores(cores.decode[number])
            values["spare_core_use"] = layout.core_use / f"decode-{number}"
        if not set(own).isdisjoint(cores.router):
            values["nice"] = PREFILL_NICE
    return values


def _prefill_variables(layout: ServiceLayout, cores: CorePlan | None, number: int) -> Mapping[str, str]:
    if cores:
        return _threads(cores.prefill[number])
    if layout.device(layout.decode + number) in map(layout.device, range(layout.decode)):
        return {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(PREFILL_GPU_PERCENT)}
    return NOTHING


def _threads(cores: Sequence[int]) -> Mapping[str, str]:
    return {"OMP_NUM_THREADS": str(len(cores))}


def _environment_of(process: str, values: Values, surroundings: Mapping[str, str], options: Set[str]) -> dict[str, str]:
    """Return the part of `surroundings` that a child gets: everything except the variables of `up`'s own options.

    Raises: CommandFailed for a variable that contradicts a decision of `up`.
    """
    for name, value in values.items():
        variable, given = variable_of(name), surroundings.get(variable_of(name))
        if given and value is not None and name not in options and given != str(value):
            raise CommandFailed(
                f"{variable} is {given!r}, but `up` itself starts {process} with {' '.join(flags_for({name: value}))}; "
                "unset the variable, or start the processes yourself (docs/deployment.md)"
            )
    return child_environment(
        {name: value for name, value in surroundings.items() if name not in set(map(variable_of, options))}
    )


def _own_variables(layout: ServiceLayout) -> Mapping[str, str]:
    """Return settings with secrets as environment variables, since every user of the machine can read arguments."""
    secret = {"BATON_SECRET": layout.secret, "BATON_SECRET_FILE": ""} if layout.secret else {}
    return {"BATON_REDIS_URL": layout.redis_url, "BATON_RUN_ID": layout.run_id, **secret}


@dataclass(frozen=True, slots=True)
class RedisSource:
    """Redis of `baton up`: the one at a given URL (`spec` is None), or a server that `up` starts with a password."""

    url: str
    spec: ProcessSpec | None

    @property
    def description(self) -> str:
        return without_password(self.url) if self.spec is None else f"{Path(self.spec.command[0]).name} (embedded)"


def choose_redis(given_url: str | None, cores: tuple[int, ...], reserved: Set[int]) -> RedisSource:
    """Return the Redis at `given_url`, or a plan to start a server on a port that is not in `reserved`.

    Raises: CommandFailed if no URL is given and no server is installed.
    """
    if given_url:
        return RedisSource(given_url, None)
    try:
        program = find_redis_server()
    except RedisServerError as error:
        raise CommandFailed(str(error)) from error
    port = free_port(reserved)
    password = secrets.token_hex(PASSWORD_BYTES)
    command = (*redis_command(program, port), CONFIGURED_BY_STDIN)
    stdin = password_configuration(password)
    spec = ProcessSpec("redis", command, Stage.REDIS, REDIS_GRACE_S, os.environ, cores=cores, noise=NOISE, stdin=stdin)
    return RedisSource(redis_url(port, password), spec)
