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
from typer.testing import CliRunner

import baton.cli.up
from baton.cli.__main__ import app
from baton.cli.up_options import UpOptions
from baton.decode_worker.config import DecodeConfig
from baton.launch.model_source import ModelSource
from baton.launch.ports import plan_ports
from baton.launch.process_plan import REDIS_GRACE_S, ROUTER_END_S, WORKER_END_S
from baton.prefill_worker.config import PrefillConfig
from baton.process.config import DRAIN_S, Settings, read_config
from baton.router.config import RouterConfig

ROOT = Path(__file__).resolve().parents[1]
FILES = ("compose.yaml", "deploy/compose.hosts.yaml")
TOOL_TIMEOUT_S = 60
CONFIGS: dict[str, type[Settings]] = {
    "router": RouterConfig,
    "prefill_worker": PrefillConfig,
    "decode_worker": DecodeConfig,
}
ONE_HOST: dict[str, str] = {}
SEVERAL_HOSTS = {"ADDRESS": "10.0.0.2", "TRANSFER_INTERFACE": "ib0"}
BOXES = ("baton", "baton-cpu")
"""Services of compose.yaml that run `baton up`."""


def services(file: str, variables: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """As compose reads them: ${NAME}, ${NAME:-default}, ${NAME:+word} and ${NAME:?message}, the innermost first."""

    def value(match: re.Match[str]) -> str:
        name, operator, word = match.groups()
        given = variables.get(name, "")
        if operator == ":+":
            return word if given else ""
        if not given and operator == ":?":
            raise KeyError(f"{name}: {word}")
        return given or (word if operator == ":-" else "")

    text, replaced = (ROOT / file).read_text(), 1
    while replaced:
        text, replaced = re.subn(r"\$\{(\w+)(?:(:-|:\+|:\?)([^${}]*))?\}", value, text)
    loaded: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    for service in loaded.values():  # compose reads the file before it replaces: nothing is an empty text there
        service["environment"] = {name: value or "" for name, value in service.get("environment", {}).items()}
    return loaded


def variables_of(file: str) -> dict[str, str]:
    return SEVERAL_HOSTS if "hosts" in file else ONE_HOST


def run_tool(module: str, *arguments: str, **variables: str) -> str:
    """In an environment of `variables` alone: those of a deployment of one's own count for nothing."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


STARTED = {
    ("compose.yaml", "cpu"): {"baton-cpu"},
    ("compose.yaml", "gpu"): {"baton"},
    ("compose.yaml", "observability"): {"prometheus", "tempo", "grafana"},
    ("deploy/compose.hosts.yaml", "router"): {"redis", "router"},
    ("deploy/compose.hosts.yaml", "worker"): {"worker"},
}
"""Services by file and profiles."""


@functools.cache
def started(file: str, profiles: str) -> str:
    """The file as podman-compose would start it, which needs no podman: of other profiles nothing, and no variables."""
    arguments = ("--dry-run", "-f", file, "config")
    return run_tool("podman_compose", *arguments, COMPOSE_PROFILES=profiles, **variables_of(file))


@pytest.mark.parametrize(("file", "profiles"), STARTED)
def test_compose_profile_starts_services_with_dependencies(file: str, profiles: str) -> None:
    every = yaml.safe_load(started(file, profiles))["services"]
    assert every.keys() == STARTED[file, profiles]
    assert all(each in every for service in every.values() for each in service.get("depends_on", ()))
    read = services(file, variables_of(file))
    assert all(service.get("command") == read[name].get("command") for name, service in every.items())


def test_compose_files_match_the_specification(tmp_path: Path) -> None:
    """Its schema knows every key and what type its value has."""
    for file, profiles in STARTED:
        (tmp_path / f"{profiles}.{Path(file).name}").write_text(started(file, profiles))
    made = [str(path) for path in tmp_path.iterdir()]
    run_tool("check_jsonschema", "--builtin-schema", "vendor.compose-spec", *FILES, *made)


def test_compose_profiles_are_all_tested() -> None:
    every = {(file, profile) for file, profiles in STARTED for profile in profiles.split(",")}
    of_services = ((file, service) for file in FILES for service in services(file, variables_of(file)).values())
    assert every == {(file, profile) for file, service in of_services for profile in service.get("profiles", ())}
    texts = (path.read_text() for pattern in ("*.md", "*.yaml", "docs/*.md") for path in ROOT.glob(pattern))
    named = {profile for text in texts for profile in re.findall(r"--profile (\w+)", text)}
    assert named == {profile for _, profile in every}


def config(name: str, monkeypatch: pytest.MonkeyPatch, **variables: str) -> Any:
    """Return the configuration of a service's process in deploy/compose.hosts.yaml."""
    service = services("deploy/compose.hosts.yaml", SEVERAL_HOSTS | variables)[name]
    for variable, value in service["environment"].items():
        if value != "":
            monkeypatch.setenv(variable, str(value))
    package, *arguments = service["command"]
    return read_config(CONFIGS[package], arguments)


@pytest.mark.parametrize("name", ["router", "worker"])
def test_hosts_service_has_a_configuration_that_its_process_accepts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config(name, monkeypatch)


@pytest.mark.parametrize("name", ["router", "worker"])
def test_hosts_service_sets_only_variables_that_its_process_reads(name: str) -> None:
    service = services("deploy/compose.hosts.yaml", SEVERAL_HOSTS)[name]
    known = {field.variable for field in CONFIGS[service["command"][0]].fields.values()}
    assert {each for each in service["environment"] if each.startswith("BATON_")} <= known


def test_hosts_gpu_worker_uses_remaining_memory_and_keeps_its_kernel_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    read = config("worker", monkeypatch, GPU_MEMORY_UTILIZATION="0.45")
    assert (read.kv_memory_bytes, read.gpu_memory_utilization, read.chunk_tokens) == (None, 0.45, 4096)
    assert "triton:/triton" in services("deploy/compose.hosts.yaml", SEVERAL_HOSTS)["worker"]["volumes"]
    assert "TRITON_CACHE_DIR=/triton" in (ROOT / "Dockerfile").read_text()


@pytest.mark.parametrize("name", ["router", "worker"])
def test_hosts_of_two_clusters_have_names_of_their_own_in_redis(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ({}, {"MODEL_NAME": "llama"}, {"MODEL_NAME": "llama", "CLUSTER": "second"})
    assert [config(name, monkeypatch, **each).namespace for each in given] == ["tableqa", "llama", "second"]
    secret = config(name, monkeypatch, BATON_SECRET="alike on all hosts").cluster_secret
    assert secret is not None and config(name, monkeypatch).namespace == "tableqa"


def up_options(name: str, monkeypatch: pytest.MonkeyPatch, **variables: str) -> UpOptions:
    """What `baton up` in the container of that service is asked for, by its command and its environment."""
    called: list[UpOptions] = []

    def run_up(options: UpOptions) -> int:
        called.append(options)
        return 0

    monkeypatch.setattr(baton.cli.up, "run_up", run_up)
    service = services("compose.yaml", variables)[name]
    package, *arguments = service["command"]
    assert package == "cli"
    environment = {variable: str(value) for variable, value in service["environment"].items()}
    done = CliRunner().invoke(app, arguments, env=environment)
    assert done.exit_code == 0, done.output
    return called[0]


@pytest.mark.parametrize("name", BOXES)
def test_box_without_variables_serves_the_mounted_model_and_lets_up_count_the_workers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = up_options(name, monkeypatch)
    assert (options.model, options.model_name, options.host) == ("/model", "tableqa", "0.0.0.0")
    assert (options.prefill, options.decode, options.tensor_parallel, options.api_keys) == (None, None, 1, None)
    ports = services("compose.yaml", ONE_HOST)[name]["ports"]
    assert ports == ["127.0.0.1:50051:50051", "127.0.0.1:8000:8000"]


@pytest.mark.parametrize("name", BOXES)
def test_box_routers_share_the_published_ports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, service = up_options(name, monkeypatch, ROUTERS="4"), services("compose.yaml", {"ROUTERS": "4"})[name]
    ports = plan_ports(options.routers or 0, options.port, options.admin_port, options.http_port, lambda port: True)
    published = [int(each.rpartition(":")[2]) for each in service["ports"]]
    assert [[each.public, each.http] for each in ports] == [published] * 4
    assert [(each.admin, each.metrics) for each in ports] == [(50052 + each, 8001 + each) for each in range(4)]
    assert service["healthcheck"]["test"][-1] == f"127.0.0.1:{ports[0].admin}"
    assert up_options(name, monkeypatch).routers == 1


def test_box_passes_workers_and_tensor_parallelism_on(monkeypatch: pytest.MonkeyPatch) -> None:
    options = up_options("baton", monkeypatch, TENSOR_PARALLEL="2", PREFILL="1", DECODE="3", KV_MEMORY="4GiB")
    assert (options.tensor_parallel, options.prefill, options.decode, options.kv_memory) == (2, 1, 3, 4 * 2**30)
    [device] = services("compose.yaml", {"GPUS": "MIG-1"})["baton"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["device_ids"] == ["MIG-1"]


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"MODEL": "/data/llama"}, "llama"),
        ({"MODEL": "./models/x/"}, "x"),
        ({"MODEL": "/m", "MODEL_NAME": "a/b"}, "a/b"),
    ],
)
def test_box_names_the_model_by_its_folder_unless_a_name_is_given(
    variables: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = up_options("baton", monkeypatch, **variables).model_name
    assert ModelSource(tmp_path, "model").called(given).name == name


def test_box_keys_are_those_of_the_mounted_file() -> None:
    service = services("compose.yaml", {"API_KEYS": "./keys"})["baton"]
    assert service["environment"]["BATON_API_KEYS"] == "/run/keys"
    assert "./keys:/run/keys:ro" in service["volumes"]
    assert services("compose.yaml", ONE_HOST)["baton"]["environment"]["BATON_API_KEYS"] == ""


@pytest.mark.parametrize("name", BOXES)
def test_box_outlives_a_reboot_and_bounds_what_it_leaves(name: str) -> None:
    service = services("compose.yaml", ONE_HOST)[name]
    assert service["restart"] == "unless-stopped" and service["init"] is True and "depends_on" not in service
    assert {"triton:/triton", "runtime:/baton/runtime"} <= set(service["volumes"])
    assert int(service["ulimits"]["nofile"]) >= 65536 and all("size=" in each for each in service["tmpfs"])
    owned = re.search(r"^RUN install --directory --owner baton (.*)$", (ROOT / "Dockerfile").read_text(), re.M)
    assert owned is not None and {"/triton", "/baton/runtime"} == set(owned.group(1).split())


@pytest.mark.parametrize("name", BOXES)
def test_box_grace_is_longer_than_all_stages_of_a_drain(name: str) -> None:
    grace = services("compose.yaml", ONE_HOST)[name]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > 2 * DRAIN_S + ROUTER_END_S + WORKER_END_S + REDIS_GRACE_S


def test_hosts_worker_advertises_reachable_address(monkeypatch: pytest.MonkeyPatch) -> None:
    read = config("worker", monkeypatch)
    service = services("deploy/compose.hosts.yaml", SEVERAL_HOSTS)["worker"]
    assert (read.advertised_host, read.transfer_interface) == ("10.0.0.2", "ib0")
    assert service["network_mode"] == "host"
    assert service["cap_add"] == ["IPC_LOCK"] and service["ulimits"] == {"memlock": -1}
    assert service["build"]["args"]["EXTRAS"] == "nixl"


def test_hosts_routers_share_the_public_ports_and_have_admin_and_metrics_ports_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = config("router", monkeypatch)
    assert (alone.share_ports, alone.admin_port, alone.metrics_port) == (False, 50052, None)
    one = config("router", monkeypatch, SHARE_PORTS="true", METRICS_PORT="8001")
    other = config("router", monkeypatch, SHARE_PORTS="true", METRICS_PORT="8002", ADMIN_PORT="50053")
    assert one.share_ports and other.share_ports
    assert (one.port, one.http_port) == (other.port, other.http_port) == (alone.port, alone.http_port)
    assert (one.admin_port, one.metrics_port, other.admin_port, other.metrics_port) == (50052, 8001, 50053, 8002)
    assert one.admin_host == "127.0.0.1", "routers of one host have admin ports on its loopback"


def test_hosts_router_drains_within_its_grace() -> None:
    grace = services("deploy/compose.hosts.yaml", SEVERAL_HOSTS)["router"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) >= DRAIN_S + ROUTER_END_S


def test_hosts_without_address_is_refused() -> None:
    with pytest.raises(KeyError, match="ADDRESS"):
        services("deploy/compose.hosts.yaml", {})


OBSERVERS = ("prometheus", "tempo", "grafana")
OBSERVABILITY = "deploy/observability"


def mounted(service: dict[str, Any]) -> dict[str, str]:
    """Our files that a container sees, by their place in it."""
    parts = (volume.split(":") for volume in service["volumes"] if volume.startswith("./"))
    return {inside: outside.removeprefix("./") for outside, inside, *_ in parts}


@pytest.mark.parametrize("name", OBSERVERS)
def test_observer_needs_profile_and_exact_version(name: str) -> None:
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
    assert found["names"] == ["baton"] and job["job_name"] == "baton"
    assert every["baton-cpu"]["networks"]["default"]["aliases"] == ["baton"]
    assert all(every[name]["ports"][1].endswith(f":{found['port']}") for name in BOXES)


PROMETHEUS_CONFIG = ROOT / OBSERVABILITY / "prometheus" / "prometheus.yaml"


def test_traces_of_a_router_go_to_the_port_where_tempo_listens() -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    [endpoint] = set(re.findall(r"OTLP_ENDPOINT=(\S+) docker compose", page))
    every = services("compose.yaml", {"OTLP_ENDPOINT": endpoint})
    assert all(every[name]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == endpoint for name in BOXES)
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
