"""The compose files are of compose's specification and start what the processes accept: commands and variables are read
by the real configurations.
"""

import functools
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from baton.gateway.config import GatewayConfig
from baton.launch.process_plan import PREFILL_GPU_PERCENT
from baton.service.config import Settings, read_config
from baton.worker.config import DecodeConfig, PrefillConfig

ROOT = Path(__file__).resolve().parents[1]
FILES = ("compose.yaml", "compose.hosts.yaml")
TOOL_TIMEOUT_S = 60
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


def variables_of(file: str) -> dict[str, str]:
    return SEVERAL_HOSTS if "hosts" in file else ONE_HOST


def run_tool(module: str, *arguments: str, **variables: str) -> str:
    """In an environment of `variables` alone: those of a deployment of one's own count for nothing."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


ALWAYS = {"redis", "namespaces", "router"}
STARTED = {
    ("compose.yaml", "cpu"): ALWAYS | {"prefill-cpu", "decode-cpu"},
    ("compose.yaml", "gpu,routers"): ALWAYS | {"prefill", "decode", "router-1"},
    ("compose.yaml", "mps"): ALWAYS | {"mps"},
    ("compose.yaml", "observability"): ALWAYS | {"prometheus", "tempo", "grafana"},
    ("compose.hosts.yaml", "router"): {"redis", "router"},
    ("compose.hosts.yaml", "worker"): {"worker"},
}
"""Services by file and profiles."""


@functools.cache
def started(file: str, profiles: str) -> str:
    """The file as podman-compose would start it, which needs no podman: of other profiles nothing, and no variables."""
    arguments = ("--dry-run", "-f", file, "config")
    return run_tool("podman_compose", *arguments, COMPOSE_PROFILES=profiles, **variables_of(file))


@pytest.mark.parametrize(("file", "profiles"), STARTED)
def test_profiles_start_their_services_with_what_these_depend_on(file: str, profiles: str) -> None:
    every = yaml.safe_load(started(file, profiles))["services"]
    assert every.keys() == STARTED[file, profiles]
    assert all(each in every for service in every.values() for each in service.get("depends_on", ()))
    read = services(file, variables_of(file))
    assert all(service.get("command") == read[name].get("command") for name, service in every.items())


def test_files_and_what_compose_makes_of_them_are_of_its_specification(tmp_path: Path) -> None:
    """Its schema knows every key and what type its value has."""
    for file, profiles in STARTED:
        (tmp_path / f"{profiles}.{file}").write_text(started(file, profiles))
    made = [str(path) for path in tmp_path.iterdir()]
    run_tool("check_jsonschema", "--builtin-schema", "vendor.compose-spec", *FILES, *made)


def test_every_profile_of_files_and_documents_was_started_here() -> None:
    every = {(file, profile) for file, profiles in STARTED for profile in profiles.split(",")}
    of_services = ((file, service) for file in FILES for service in services(file, variables_of(file)).values())
    assert every == {(file, profile) for file, service in of_services for profile in service.get("profiles", ())}
    texts = (path.read_text() for pattern in ("*.md", "*.yaml", "docs/*.md") for path in ROOT.glob(pattern))
    named = {profile for text in texts for profile in re.findall(r"--profile (\w+)", text)}
    assert named == {profile for _, profile in every}


def config(file: str, name: str, monkeypatch: pytest.MonkeyPatch, **variables: str) -> Any:
    """What the process of that service would run with."""
    service = services(file, variables_of(file) | variables)[name]
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


def test_workers_of_one_gpu_reach_a_daemon_of_their_user_in_their_namespaces() -> None:
    every = services("compose.yaml", ONE_HOST)
    daemon = every["mps"]
    assert daemon["entrypoint"][-1].endswith("exec nvidia-cuda-mps-control -f")
    for name in ("prefill", "decode"):
        worker = every[name]
        assert all(worker[each] == daemon[each] for each in ("image", "ipc", "pid", "deploy"))
        assert "user" not in worker and "user" not in daemon, "so both have that of the image"
        pipes = worker["environment"]["CUDA_MPS_PIPE_DIRECTORY"]
        assert pipes == daemon["environment"]["CUDA_MPS_PIPE_DIRECTORY"]
        assert pipes.startswith("/dev/shm/"), "which they share with their IPC namespace"
    share = every["prefill"]["environment"]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]
    assert share == str(PREFILL_GPU_PERCENT)
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in every["decode"]["environment"]


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


OBSERVERS = ("prometheus", "tempo", "grafana")
OBSERVABILITY = "deploy/observability"


def mounted(service: dict[str, Any]) -> dict[str, str]:
    """Our files that a container sees, by their place in it."""
    parts = (volume.split(":") for volume in service["volumes"] if volume.startswith("./"))
    return {inside: outside.removeprefix("./") for outside, inside, *_ in parts}


@pytest.mark.parametrize("name", OBSERVERS)
def test_an_observer_starts_only_with_its_profile_from_an_exact_version(name: str) -> None:
    service = services("compose.yaml", ONE_HOST)[name]
    assert service["profiles"] == ["observability"]
    assert re.fullmatch(r"docker\.io/[\w/-]+:v?\d+\.\d+\.\d+", service["image"])
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert all((ROOT / outside).is_dir() for outside in mounted(service).values())
    assert all(volume.endswith(":ro") for volume in service["volumes"] if volume.startswith("./"))


def test_prometheus_scrapes_the_http_port_of_every_router_with_exemplars_and_alerts() -> None:
    every = services("compose.yaml", ONE_HOST)
    command, folders = every["prometheus"]["command"], mounted(every["prometheus"])
    assert "--enable-feature=exemplar-storage" in command
    assert f"--config.file=/etc/prometheus/{PROMETHEUS_CONFIG.name}" in command
    assert ROOT / folders["/etc/prometheus"] == PROMETHEUS_CONFIG.parent
    loaded = yaml.safe_load(PROMETHEUS_CONFIG.read_text())
    assert all((PROMETHEUS_CONFIG.parent / file).exists() for file in loaded["rule_files"])
    [job] = loaded["scrape_configs"]
    [found] = job["dns_sd_configs"]
    routers = {name for name, service in every.items() if service.get("command", [""])[0] == "gateway"}
    assert set(found["names"]) == routers and job["job_name"] == "baton"
    assert all(each.endswith(f":{found['port']}") for name in routers for each in every[name]["ports"][1:])


PROMETHEUS_CONFIG = ROOT / OBSERVABILITY / "prometheus" / "prometheus.yaml"


def test_traces_of_a_router_go_to_the_port_where_tempo_listens() -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    [endpoint] = set(re.findall(r"OTLP_ENDPOINT=(\S+) docker compose", page))
    every = services("compose.yaml", {"OTLP_ENDPOINT": endpoint})
    assert every["router"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == endpoint
    scheme, host, port = re.fullmatch(r"(\w+)://(\w+):(\d+)", endpoint).groups()  # type: ignore[union-attr]
    assert scheme == "http" and host in every
    [config_flag] = every[host]["command"]
    [(inside, outside)] = mounted(every[host]).items()
    loaded = yaml.safe_load((ROOT / config_flag.removeprefix("-config.file=").replace(inside, outside)).read_text())
    assert loaded["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"] == f"0.0.0.0:{port}"


def test_grafana_finds_its_data_sources_and_dashboards() -> None:
    every = services("compose.yaml", ONE_HOST)
    folders = mounted(every["grafana"])
    provisioning = ROOT / folders["/etc/grafana/provisioning"]
    [provider] = yaml.safe_load((provisioning / "dashboards" / "dashboards.yaml").read_text())["providers"]
    boards = ROOT / folders[provider["options"]["path"]]
    home = Path(every["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (boards / home.name).exists() and str(home.parent) == provider["options"]["path"]
    sources = yaml.safe_load((provisioning / "datasources" / "datasources.yaml").read_text())["datasources"]
    hosts = {re.fullmatch(r"http://(\w+):\d+", source["url"]).group(1) for source in sources}  # type: ignore[union-attr]
    assert hosts == {"prometheus", "tempo"} <= every.keys()
    [link] = [each for source in sources for each in source.get("jsonData", {}).get("exemplarTraceIdDestinations", [])]
    assert link["name"] == "trace_id" and link["datasourceUid"] in {source["uid"] for source in sources}
