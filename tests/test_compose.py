"""The compose files start what the processes accept: commands and variables are read by the real configurations."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from baton.gateway.config import GatewayConfig
from baton.service.config import Settings, read_config
from baton.worker.config import DecodeConfig, PrefillConfig

ROOT = Path(__file__).resolve().parents[1]
CONFIGS: dict[str, type[Settings]] = {
    "gateway": GatewayConfig,
    "prefill_worker": PrefillConfig,
    "decode_worker": DecodeConfig,
}
ONE_HOST: dict[str, str] = {}
SEVERAL_HOSTS = {"ADDRESS": "10.0.0.2", "TRANSFER_INTERFACE": "ib0"}
OURS = [
    *((file, name) for file in ("compose.yaml",) for name in ("router", "router-1", "prefill", "decode")),
    *(("compose.yaml", name) for name in ("prefill-cpu", "decode-cpu")),
    *(("compose.hosts.yaml", name) for name in ("router", "worker")),
]


def services(file: str, variables: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """As compose reads them: ${NAME}, ${NAME:-default} and ${NAME:?message}."""

    def value(match: re.Match[str]) -> str:
        name, operator, word = match.groups()
        if name not in variables and operator == ":?":
            raise KeyError(f"{name}: {word}")
        return variables.get(name, word if operator == ":-" else "")

    text = re.sub(r"\$\{(\w+)(?:(:-|:\?)([^}]*))?\}", value, (ROOT / file).read_text())
    loaded: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return loaded


def config(file: str, name: str, monkeypatch: pytest.MonkeyPatch, **variables: str) -> Any:
    """What the process of that service would run with."""
    service = services(file, (SEVERAL_HOSTS if "hosts" in file else ONE_HOST) | variables)[name]
    for variable, value in service["environment"].items():
        if value != "":
            monkeypatch.setenv(variable, str(value))
    package, *arguments = service["command"]
    return read_config(CONFIGS[package], arguments)


@pytest.mark.parametrize(("file", "name"), OURS)
def test_every_service_has_a_configuration_that_its_process_accepts(
    file: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config(file, name, monkeypatch)


@pytest.mark.parametrize(("file", "name"), OURS)
def test_every_variable_of_ours_is_one_that_the_process_reads(file: str, name: str) -> None:
    service = services(file, SEVERAL_HOSTS)[name]
    known = {field.variable for field in CONFIGS[service["command"][0]].fields.values()}
    assert {each for each in service["environment"] if each.startswith("BATON_")} <= known


@pytest.mark.parametrize(
    ("file", "name"),
    [("compose.yaml", "prefill"), ("compose.yaml", "decode"), ("compose.hosts.yaml", "worker")],
)
def test_a_gpu_worker_takes_the_memory_that_is_left_and_keeps_what_it_compiles(
    file: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = config(file, name, monkeypatch, GPU_MEMORY_UTILIZATION="0.45")
    assert (read.kv_memory_bytes, read.gpu_memory_utilization, read.chunk_tokens) == (None, 0.45, 4096)
    service = services(file, SEVERAL_HOSTS)[name]
    assert "triton:/triton" in service["volumes"]
    assert "TRITON_CACHE_DIR=/triton" in (ROOT / "Dockerfile").read_text()


@pytest.mark.parametrize("name", ["prefill", "decode", "prefill-cpu", "decode-cpu"])
def test_workers_share_the_namespaces_of_a_service_that_starts_before_them(name: str) -> None:
    every = services("compose.yaml", ONE_HOST)
    for kind in ("ipc", "pid"):
        holder = every[name][kind].removeprefix("service:")
        assert holder in every[name]["depends_on"]
        assert "container_name" not in every[holder], "two projects of one host would collide"


def test_a_worker_of_several_hosts_advertises_an_address_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    read = config("compose.hosts.yaml", "worker", monkeypatch)
    service = services("compose.hosts.yaml", SEVERAL_HOSTS)["worker"]
    assert (read.advertised_host, read.transfer_interface) == ("10.0.0.2", "ib0")
    assert service["network_mode"] == "host"
    assert service["cap_add"] == ["IPC_LOCK"] and service["ulimits"] == {"memlock": -1}
    assert service["build"]["args"]["EXTRAS"] == "nixl"


def test_a_host_without_an_address_is_refused() -> None:
    with pytest.raises(KeyError, match="ADDRESS"):
        services("compose.hosts.yaml", {})
