"""The command line of every process."""

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError
from redis.exceptions import ConnectionError as RedisConnectionError

from baton.decode_worker.config import DecodeConfig
from baton.elastic_worker.config import ElasticConfig
from baton.launch.devices import DeviceError, Machine
from baton.launch.ports import RouterPorts
from baton.launch.process_plan import choose_redis
from baton.launch.processes import ChildProcess, LineWriter, ProcessSpec, Stage
from baton.process.config import ConfigError, Settings, read_config
from baton.router.config import RouterConfig
from tests.fixtures.service_layout import ADAPTERS, CPU, TWO_GPUS, layout, plan
from tests.fixtures.waiting import eventually

CONFIGS: dict[str, type[Settings]] = {
    "baton.router": RouterConfig,
    "baton.elastic_worker": ElasticConfig,
}


def by_name(**changes: Any) -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in plan(layout(**changes))}


def flag(spec: ProcessSpec, name: str) -> str:
    return spec.command[spec.command.index(name) + 1]


@pytest.mark.parametrize("machine", [CPU, TWO_GPUS])
def test_process_plan_flags_are_accepted_by_processes(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in plan(layout(machine=machine, prefill=2, decode=2)):
        monkeypatch.setenv("BATON_REDIS_URL", spec.environment["BATON_REDIS_URL"])
        module = spec.command[spec.command.index("-m") + 1]
        arguments = spec.command[spec.command.index("-m") + 2 :]
        assert isinstance(read_config(CONFIGS[module], arguments, module), CONFIGS[module])


def test_process_plan_passes_adapters_to_both_roles() -> None:
    for spec in plan(layout()):
        if spec.stage is Stage.WORKER:
            config = read_config(ElasticConfig, spec.command[spec.command.index("-m") + 2 :], "worker")
            assert config.adapter == ADAPTERS


def test_process_plan_given_a_redis_password_keeps_it_out_of_every_command_line() -> None:
    url = "redis://:s3cret@10.0.0.1:6379/0"
    specs = plan(layout(redis_url=url))
    assert not [word for spec in specs for word in spec.command if "s3cret" in word]
    assert {spec.environment["BATON_REDIS_URL"] for spec in specs} == {url}


async def test_embedded_redis_refuses_client_without_password() -> None:
    source = choose_redis(None, (), set())
    assert source.spec is not None
    password = urlsplit(source.url).password
    assert password and password not in " ".join(source.spec.command) and password not in repr(source.spec)
    child = await ChildProcess.start(source.spec, LineWriter(sys.stdout), LineWriter(sys.stderr))
    try:
        async with (
            Redis.from_url(source.url) as ours,
            Redis.from_url(source.url.replace(f":{password}@", "")) as theirs,
        ):
            await eventually(lambda: _answers(ours))
            assert await ours.set("key", "value")
            with pytest.raises(AuthenticationError):
                await theirs.get("key")
    finally:
        child.send(signal.SIGKILL)
        await child.wait()


async def _answers(redis: Redis) -> bool:
    try:
        return bool(await redis.ping())
    except RedisConnectionError:
        return False


def test_process_plan_two_cores_isolate_decode() -> None:
    specs = by_name()
    cores = {name: flag(spec, "--cores") for name, spec in specs.items()}
    assert cores == {"router": "1", "prefill-0": "1", "decode-0": "0"}
    assert {flag(specs[name], "--transfer-cores") for name in ("prefill-0", "decode-0")} == {"1"}
    assert {specs[name].environment["OMP_NUM_THREADS"] for name in ("prefill-0", "decode-0")} == {"1"}


def test_process_plan_prefill_on_router_core_is_nice() -> None:
    shared, apart = by_name(), by_name(machine=replace(CPU, cores=(0, 1, 2)))
    assert flag(shared["prefill-0"], "--nice") == "5"
    assert not any("--nice" in spec.command for spec in (shared["decode-0"], *apart.values()))


def test_process_plan_gpu_workers_take_gpus_in_turn() -> None:
    specs = by_name(machine=TWO_GPUS, prefill=1, decode=2)
    devices = {name: flag(spec, "--device") for name, spec in specs.items() if spec.stage is Stage.WORKER}
    assert devices == {"decode-0": "cuda:0", "decode-1": "cuda:1", "prefill-0": "cuda:0"}
    assert not any("--cores" in spec.command for spec in specs.values())


def test_process_plan_colocated_has_no_prefill_workers() -> None:
    assert set(by_name(prefill=0)) == {"router", "decode-0"}


@pytest.mark.parametrize("prefill", [0, 1])
def test_process_plan_objectives_reach_router_and_workers(prefill: int) -> None:
    specs = by_name(prefill=prefill, ttft_slo_ms=900.0, tbt_slo_ms=20.0, strict_tbt=True)
    assert (flag(specs["router"], "--ttft-slo-ms"), flag(specs["router"], "--tbt-slo-ms")) == ("900.0", "20.0")
    for name in specs.keys() - {"router"}:
        assert flag(specs[name], "--tbt-slo-ms") == "20.0" and "--strict-tbt" in specs[name].command


def test_process_plan_workers_listen_on_loopback() -> None:
    specs = by_name(host="0.0.0.0")
    assert {name: flag(spec, "--host") for name, spec in specs.items()} == {
        "router": "0.0.0.0",
        "prefill-0": "127.0.0.1",
        "decode-0": "127.0.0.1",
    }


def test_process_plan_gpu_workers_share_memory_equally() -> None:
    given: dict[str, Any] = {"machine": TWO_GPUS, "prefill": 2, "decode": 1, "kv_memory": None}
    specs = by_name(**given)
    assert {flag(specs[name], "--gpu-memory-utilization") for name in ("prefill-0", "decode-0")} == {"0.450"}
    config = read_config(ElasticConfig, specs["decode-0"].command[4:])
    assert (config.kv_memory, config.kv_memory_bytes) == ("auto", None)


def test_kv_memory_auto_on_cpu_is_the_default() -> None:
    command = by_name()["decode-0"].command[4:]
    config = read_config(ElasticConfig, [*command, "--kv-memory", "auto"])
    assert config.kv_memory_bytes == ElasticConfig.fields["kv_memory"].default


def test_kv_memory_default_is_a_share_of_memory() -> None:
    assert CPU.default_kv_bytes == 2**30
    assert Machine((0,), memory_bytes=2**30).default_kv_bytes == int(0.1 * 2**30)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_process_plan_gpu_workers_measure_kv_memory(tensor_parallel: int) -> None:
    kv_memory = TWO_GPUS.default_kv_bytes
    workers = by_name(machine=TWO_GPUS, decode=2, kv_memory=kv_memory, tensor_parallel=tensor_parallel)
    assert {flag(spec, "--kv-memory") for name, spec in workers.items() if name != "router"} == {"auto"}


def test_process_plan_ranks_use_consecutive_gpus() -> None:
    five = replace(TWO_GPUS, gpu_free_bytes=(10**9,) * 5)
    specs = by_name(machine=five, prefill=1, decode=2, tensor_parallel=2)
    devices = {name: flag(spec, "--device") for name, spec in specs.items() if name != "router"}
    assert devices == {"decode-0": "cuda:0", "decode-1": "cuda:2", "prefill-0": "cuda:0"}
    assert all(flag(specs[name], "--tensor-parallel") == "2" for name in devices)
    with pytest.raises(DeviceError, match="--tensor-parallel: 4 exceeds the 2 GPUs"):
        plan(layout(machine=TWO_GPUS, tensor_parallel=4))


@pytest.mark.parametrize(
    ("gpus", "tensor_parallel", "given", "counts"),
    [
        (0, 1, (None, None), (1, 1)),
        (0, 1, (0, None), (0, 1)),
        (1, 1, (None, None), (0, 1)),
        (1, 1, (1, None), (1, 1)),
        (2, 1, (None, None), (1, 1)),
        (2, 2, (None, None), (0, 1)),
        (4, 1, (None, None), (2, 2)),
        (8, 1, (None, None), (4, 4)),
        (8, 2, (None, None), (2, 2)),
        (8, 1, (None, 6), (2, 6)),
        (8, 1, (3, None), (3, 5)),
        (8, 1, (0, None), (0, 8)),
        (3, 1, (None, None), (1, 2)),
    ],
)
def test_worker_counts_use_every_group_of_gpus_once(
    gpus: int, tensor_parallel: int, given: tuple[int | None, int | None], counts: tuple[int, int]
) -> None:
    machine = replace(CPU, gpu_free_bytes=(10**9,) * gpus)
    assert machine.worker_counts(*given, tensor_parallel) == counts
    prefill, decode = counts
    specs = by_name(machine=machine, prefill=prefill, decode=decode, tensor_parallel=tensor_parallel)
    devices = [flag(spec, "--device") for name, spec in specs.items() if name != "router"]
    shared = gpus == 1 and prefill == 1
    assert not gpus or len(set(devices)) == len(devices) - shared


def test_process_plan_process_groups_use_loopback() -> None:
    gloo = by_name(transport="gloo")
    for name in ("prefill-0", "decode-0"):
        assert (flag(gloo[name], "--transport"), flag(gloo[name], "--transfer-interface")) == ("gloo", "lo")
    assert "--transfer-interface" not in by_name()["decode-0"].command


def test_worker_config_process_group_needs_interface() -> None:
    flags = ["--worker-id", "d", "--model", "/models/tiny", "--port", "0"]
    with pytest.raises(ConfigError, match="--transport gloo needs --transfer-interface"):
        read_config(DecodeConfig, [*flags, "--transport", "gloo"])
    assert read_config(DecodeConfig, [*flags, "--transport", "gloo", "--transfer-interface", "lo"]).transport == "gloo"


def test_process_plan_routers_share_public_ports_and_have_own_admin_and_metrics_ports() -> None:
    specs = by_name(ports=(RouterPorts(50051, 50052, 8000, 8001), RouterPorts(50051, 50053, 8000, 8002)))
    routers = {name: spec for name, spec in specs.items() if spec.stage is Stage.ROUTER}
    flags = ("--port", "--http-port", "--admin-port", "--metrics-port")
    ports = {name: tuple(flag(spec, each) for each in flags) for name, spec in routers.items()}
    assert ports == {"router": ("50051", "8000", "50052", "8001"), "router-1": ("50051", "8000", "50053", "8002")}
    assert all("--share-ports" in spec.command for spec in routers.values())
    assert {flag(spec, "--namespace") for spec in routers.values()} == {"baton-50051"}


def test_process_plan_single_router_shares_no_port() -> None:
    assert not {"--share-ports", "--metrics-port"} & set(by_name()["router"].command)


def test_process_plan_prefill_on_shared_gpu_is_limited() -> None:
    one_gpu = replace(TWO_GPUS, gpu_free_bytes=(80 * 10**9,))
    for machine, percent in ((one_gpu, "75"), (TWO_GPUS, None), (CPU, None)):
        specs = by_name(machine=machine)
        assert specs["prefill-0"].environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") == percent
        assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in specs["decode-0"].environment


def test_process_plan_passes_draft_model_to_workers() -> None:
    specs = by_name(speculate="draft", draft_model=Path("/models/small"))
    for name in ("prefill-0", "decode-0"):
        command = specs[name].command
        assert command[command.index("--draft-model") + 1] == "/models/small"
