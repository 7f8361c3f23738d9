"""Pods of deploy/kubernetes have settings that the processes accept, drains within their grace, metrics that exist."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from baton.decode_worker.config import DecodeConfig
from baton.lab.dashboards.alerts import JOB
from baton.prefill_worker.config import PrefillConfig
from baton.process.config import Settings, read_config
from baton.router.config import RouterConfig
from tests.fixtures.kubernetes import (
    COMPONENTS,
    MANIFESTS,
    OVERLAYS,
    Object,
    containers,
    kustomize,
    name_of,
    of_kind,
    pods,
    rendered,
    selects,
    settings,
)
from tests.fixtures.tools import ROOT
from tests.lab.dashboards.expressions import SERIES, faults

CONFIGS: dict[str, type[Settings]] = {
    "router": RouterConfig,
    "prefill_worker": PrefillConfig,
    "decode_worker": DecodeConfig,
}
EVERY = [(overlay, ()) for overlay in OVERLAYS] + [("cpu", COMPONENTS), ("gpu", COMPONENTS)]
over_all = pytest.mark.parametrize(("overlay", "components"), EVERY, ids=lambda each: "+" if each else None)
PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
TO_END_S = 10
"""Maximum seconds between the end of a drain and the exit of the process."""
OF_NO_FLAG = {"OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME"}
PLACE, URL = "/etc/baton", "rediss://:word@redis.example:6380/0?ssl_ca_certs=/etc/baton/redis/ca.crt"
IN_A_POD = {
    "metadata.name": "baton-decode-0",
    "metadata.namespace": "baton",
    "status.podIP": "10.1.2.3",
    "limits.cpu": "1",
}


def ours(objects: tuple[Object, ...]) -> list[tuple[Object, Object]]:
    """(pod, container) of our processes."""
    return [(pod, each) for name, pod, each in containers(objects) if name != "baton-redis"]


def text_of(value: Any, secrets: Path) -> str:
    """Return the value of a variable, with the files of secrets in `secrets`."""
    if isinstance(value, dict):
        [(kind, reference)] = value.items()
        value = URL if kind == "secretKeyRef" else IN_A_POD[reference.get("fieldPath") or reference["resource"]]
    return str(value).replace(PLACE, str(secrets))


@over_all
def test_pod_configurations_are_accepted(
    overlay: str, components: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    objects = rendered(overlay, components)
    assert len(ours(objects)) == 3
    for pod, container in ours(objects):
        [package] = container["args"]
        for volume in pod["volumes"]:
            for mount in container["volumeMounts"]:
                if mount["name"] == volume["name"] and "secret" in volume:
                    (tmp_path / Path(mount["mountPath"]).relative_to(PLACE)).mkdir(exist_ok=True)
        for file in ("redis/ca.crt", "keys/keys"):
            if (tmp_path / file).parent.exists():
                (tmp_path / file).touch()
        found = settings(objects, container)
        assert found.keys() - OF_NO_FLAG <= {field.variable for field in CONFIGS[package].fields.values()}, package
        with monkeypatch.context() as variables:
            for name, value in found.items():
                variables.setenv(name, text_of(value, tmp_path))
            config: Any = read_config(CONFIGS[package], [])
        assert config.host == "0.0.0.0"
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert config.port == ports["grpc"]
        if package == "router":
            assert (config.http_port, config.admin_host) == (ports["http"], "127.0.0.1")
            assert config.has_keys == ("api-keys" in components) != config.insecure
        else:
            assert (config.worker_id, config.advertised_host) == ("baton-decode-0", "10.1.2.3")
            assert config.device == ("cpu" if overlay == "cpu" else "cuda")
        if components:
            assert config.redis_url.startswith("rediss://:") and config.internal_tls is not None
            assert config.namespace == "baton" and config.cluster_secret is not None


@over_all
def test_pod_drain_fits_the_grace_period(overlay: str, components: tuple[str, ...]) -> None:
    objects = rendered(overlay, components)
    for pod, container in ours(objects):
        [package] = container["args"]
        default = CONFIGS[package].fields["drain_s"].default
        drain_s = float(settings(objects, container).get("BATON_DRAIN_S", default))
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert pod["terminationGracePeriodSeconds"] >= float(hook[1]) + drain_s + TO_END_S, package


@over_all
def test_pod_images_have_the_version(overlay: str, components: tuple[str, ...]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name, _, container in containers(rendered(overlay, components)):
        repository, _, tag = container["image"].rpartition(":")
        if name == "baton-redis":
            assert container["image"] in (ROOT / "deploy/compose.hosts.yaml").read_text()
        else:
            assert repository.startswith("baton-") and tag == version
            assert f"`{repository}:{version}`" in PAGE, "the page says how to build it"


def test_secrets_are_documented_and_not_in_the_repository() -> None:
    objects = rendered("cpu", COMPONENTS)
    assert not of_kind(objects, "Secret"), "none is in the repository"
    assert not re.search(r"'secret", repr(rendered("cpu"))), "without components none is needed"
    volumes = [volume for template in pods(objects).values() for volume in template["spec"]["volumes"]]
    used = {volume["secret"]["secretName"]: volume["secret"]["defaultMode"] for volume in volumes if "secret" in volume}
    assert used.keys() == {"baton-redis", "baton-api-keys", "baton-public-tls", "baton-internal-tls"}
    assert set(used.values()) == {0o440}
    for name in (*used, "baton-metrics-key", "baton-secret"):
        assert re.search(rf"kubectl create secret (generic|tls) {name} ", PAGE.replace("\\\n", "")), name


def test_probes_reach_processes_with_tls() -> None:
    every = {container["args"][0]: container for _, container in ours(rendered("cpu", COMPONENTS))}
    assert every["router"]["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    for package in ("prefill_worker", "decode_worker"):
        worker = every[package]
        [port] = [each["value"] for each in worker["env"] if each["name"] == "BATON_HEALTH_PORT"]
        assert all(worker[kind]["grpc"]["port"] == int(port) for kind in ("startupProbe", "readinessProbe"))


def test_external_redis_replaces_redis() -> None:
    names = {name_of(each) for each in rendered("cpu", ("external-redis",))}
    assert not {"baton-redis", "baton-to-redis"} & names
    assert {"baton-redis", "baton-to-redis"} <= {name_of(each) for each in rendered("cpu")}


def test_autoscalers_have_targets_and_existing_metrics() -> None:
    objects = rendered("cpu", COMPONENTS)
    sets = {(each["kind"], name_of(each)): each for each in of_kind(objects, "Deployment", "StatefulSet")}
    scalers = of_kind(objects, "HorizontalPodAutoscaler")
    targets = {(each["spec"]["scaleTargetRef"]["kind"], each["spec"]["scaleTargetRef"]["name"]) for each in scalers}
    assert targets == sets.keys()
    assert all("replicas" not in each["spec"] for each in sets.values()), "an apply would set it again"
    given = {rule["name"]["as"]: rule for rule in adapter_rules()}
    used = [
        metric["external"]["metric"] for each in scalers for metric in each["spec"]["metrics"] if "external" in metric
    ]
    assert {metric["name"] for metric in used} == given.keys()
    roles = [metric["selector"]["matchLabels"]["role"] for metric in used if "selector" in metric]
    assert sorted(roles) == ["decode", "prefill"] and "by (role)" in given["baton_desired_replicas"]["metricsQuery"]


def adapter_rules() -> list[Object]:
    text = (MANIFESTS / "components" / "autoscaling" / "prometheus-adapter.yaml").read_text()
    rules: list[Object] = yaml.safe_load(text)["rules"]["external"]
    return rules


def series_of(rule: Object) -> str:
    found: str = rule["seriesQuery"].partition("{")[0]
    return found


@pytest.mark.parametrize(
    "rule",
    # The number of workers that the planner would have: a set goes by its other metric where routers do not report it.
    [each for each in adapter_rules() if series_of(each) in SERIES or series_of(each) != "baton:desired_replicas"],
    ids=lambda rule: rule["name"]["as"],
)
def test_prometheus_adapter_reads_existing_series(rule: Object) -> None:
    query = rule["metricsQuery"].replace("<<.Series>>", series_of(rule)).replace("<<.LabelMatchers>>,", "")
    assert faults(query.replace("<<.LabelMatchers>>", "")) == []
    for name in re.findall(r"(baton-\w+)-\.\*", query):
        assert name in pods(rendered("cpu")), "workers are called by their pods"


def test_service_monitor_finds_each_router_once() -> None:
    objects = rendered("cpu", ("monitoring",))
    [monitor] = of_kind(objects, "ServiceMonitor")
    [found] = [one for one in of_kind(objects, "Service") if labels(one).items() >= wanted_by(monitor).items()]
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in found["spec"]["ports"]} and endpoint["path"] == "/metrics"
    assert labels(found)[monitor["spec"]["jobLabel"]] == JOB
    assert [name for name, pod in pods(objects).items() if selects(found["spec"]["selector"], pod)] == ["baton-router"]


def labels(each: Object) -> dict[str, str]:
    found: dict[str, str] = each["metadata"]["labels"]
    return found


def wanted_by(monitor: Object) -> dict[str, str]:
    found: dict[str, str] = monitor["spec"]["selector"]["matchLabels"]
    return found


def test_monitoring_contains_alerts_and_dashboards() -> None:
    objects = rendered("cpu", ("monitoring",))
    folder = ROOT / "deploy" / "observability"
    [rule] = of_kind(objects, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((folder / "prometheus" / "alerts.yaml").read_text())
    boards = [each for each in of_kind(objects, "ConfigMap") if labels(each).get("grafana_dashboard") == "1"]
    texts = {name: text for each in boards for name, text in each["data"].items()}
    assert texts == {path.name: path.read_text() for path in (folder / "grafana" / "dashboards").glob("*.json")}


def test_service_monitor_with_keys_and_tls_has_access() -> None:
    [monitor] = of_kind(rendered("cpu", COMPONENTS), "ServiceMonitor")
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["scheme"] == "https" and endpoint["authorization"]["credentials"]["name"] == "baton-metrics-key"


def test_kubernetes_page_is_complete_and_its_example_renders(tmp_path: Path) -> None:
    for folder in ("overlays", "components"):
        assert all(f"`{each.name}`" in PAGE for each in (MANIFESTS / folder).iterdir())
    assert {each.name for each in (MANIFESTS / "components").iterdir()} == {*COMPONENTS}
    [example] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    up = Path(*[".."] * len(tmp_path.resolve().parts[1:])) / ROOT.relative_to("/")
    (tmp_path / "kustomization.yaml").write_text(example.replace("baton/deploy/", f"{up}/deploy/"))
    objects = tuple(kustomize(tmp_path.resolve()))
    every = [settings(objects, container) for _, container in ours(objects)]
    assert {found.get("BATON_MODEL_NAME") for found in every} == {None, "llama"}, "routers learn it from workers"
    replicas = {name_of(each): each["spec"]["replicas"] for each in of_kind(objects, "Deployment", "StatefulSet")}
    assert (replicas["baton-router"], replicas["baton-decode"], replicas["baton-prefill"]) == (4, 4, 2)
