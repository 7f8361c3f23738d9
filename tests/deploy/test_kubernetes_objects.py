"""The objects of deploy/kubernetes are of Kubernetes' own schemas, have few rights, and fit: labels, ports, volumes."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from kubernetes_validate import utils as schemas

from tests.fixtures.kubernetes import (
    COMPONENTS,
    MANIFESTS,
    OVERLAYS,
    Object,
    containers,
    name_of,
    of_kind,
    pods,
    rendered,
    selects,
)

VERSIONS = ("1.27", "1.32", "1.37")
"""The oldest that has all we use (probes by gRPC), one between, and the newest whose schemas there are."""
OPERATORS = {"ServiceMonitor", "PrometheusRule"}
"""Kinds of the Prometheus Operator, of which Kubernetes has no schema."""
EVERY = [(overlay, ()) for overlay in OVERLAYS] + [("cpu", COMPONENTS), ("gpu", COMPONENTS)]
over_all = pytest.mark.parametrize(("overlay", "components"), EVERY, ids=lambda each: "+" if each else None)
ROUTER = "baton-router"
INTO_WORKERS = {(ROUTER, "grpc"), ("baton-prefill", "*"), ("baton-decode", "*")}
REACHED = {
    ROUTER: {("anyone", "grpc"), ("anyone", "http")},
    "baton-prefill": INTO_WORKERS,
    "baton-decode": INTO_WORKERS,
    "baton-redis": {(ROUTER, "redis"), ("baton-prefill", "redis"), ("baton-decode", "redis")},
}
"""Allowed peers and ports of each set of pods."""


def test_kubernetes_objects_match_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strict ones: an unknown field is an error."""
    monkeypatch.setattr(schemas, "schema_contents", functools.cache(schemas.schema_contents))
    every = {repr(each): each for overlay, components in EVERY for each in rendered(overlay, components)}
    known = [each for each in every.values() if each["kind"] not in OPERATORS]
    assert len(known) > 40
    for each in known:
        for version in VERSIONS:
            schemas.validate(each, version, strict=True)


def test_fill_model_pod_is_restricted() -> None:
    pod = yaml.safe_load((MANIFESTS / "fill-model.yaml").read_text())
    for version in VERSIONS:
        schemas.validate(pod, version, strict=True)
    [like], [container] = (
        [each for name, _, each in containers(rendered("cpu")) if name == ROUTER],
        pod["spec"]["containers"],
    )
    assert (container["image"], container["securityContext"]) == (like["image"], like["securityContext"])
    assert pod["spec"]["securityContext"]["runAsNonRoot"] and not pod["spec"]["automountServiceAccountToken"]
    assert pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == "baton-model"


def test_wrong_kubernetes_field_is_found() -> None:
    [service, *_] = of_kind(rendered("cpu"), "Service")
    with pytest.raises(schemas.ValidationError):
        schemas.validate(service | {"spec": service["spec"] | {"selektor": {}}}, VERSIONS[0], strict=True)


@over_all
def test_containers_have_no_extra_rights(overlay: str, components: tuple[str, ...]) -> None:
    for name, pod, container in containers(rendered(overlay, components)):
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["runAsUser"] > 0, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["enableServiceLinks"] is False, f"{name}: the Service `baton` would set BATON_PORT"
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys(), name
        assert not any("hostPath" in volume for volume in pod["volumes"]), name
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name


@over_all
def test_containers_have_probes_and_resources(overlay: str, components: tuple[str, ...]) -> None:
    for name, pod, container in containers(rendered(overlay, components)):
        given = container["resources"]
        assert {"cpu", "memory"} <= given["requests"].keys() & given["limits"].keys(), name
        assert {"readinessProbe", "livenessProbe"} <= container.keys(), name
        assert all("sizeLimit" in each["emptyDir"] for each in pod["volumes"] if "emptyDir" in each), name


def test_gpu_workers_have_one_gpu_each() -> None:
    for overlay in ("gpu", "multi-node"):
        workers = [each for name, _, each in containers(rendered(overlay)) if name in ("baton-prefill", "baton-decode")]
        assert len(workers) == 2
        for worker in workers:
            assert worker["resources"]["limits"]["nvidia.com/gpu"] == worker["resources"]["requests"]["nvidia.com/gpu"]
    assert all("nvidia.com/gpu" not in each["resources"]["limits"] for _, _, each in containers(rendered("cpu")))


@over_all
def test_selectors_find_pods(overlay: str, components: tuple[str, ...]) -> None:
    objects = rendered(overlay, components)
    every = pods(objects)
    for each in of_kind(objects, "Deployment", "StatefulSet"):
        assert selects(each["spec"]["selector"]["matchLabels"], each["spec"]["template"])
        for spread in each["spec"]["template"]["spec"].get("topologySpreadConstraints", ()):
            assert selects(spread["labelSelector"]["matchLabels"], each["spec"]["template"])
    for each in of_kind(objects, "PodDisruptionBudget"):
        found = [name for name, pod in every.items() if selects(each["spec"]["selector"]["matchLabels"], pod)]
        assert found == [name_of(each)], "a budget is of one set"
    for each in of_kind(objects, "NetworkPolicy"):
        assert any(selects(each["spec"]["podSelector"]["matchLabels"], pod) for pod in every.values()), name_of(each)
    budgets = {name_of(each) for each in of_kind(objects, "PodDisruptionBudget")}
    assert budgets == every.keys() - {"baton-redis"}


@over_all
def test_named_ports_exist(overlay: str, components: tuple[str, ...]) -> None:
    objects = rendered(overlay, components)
    for service in of_kind(objects, "Service"):
        found = [pod for pod in pods(objects).values() if selects(service["spec"]["selector"], pod)]
        assert found, name_of(service)
        for port in service["spec"]["ports"]:
            assert all(ports(pod)[port["targetPort"]] == port["port"] for pod in found), name_of(service)
    for _, pod, container in containers(objects):
        own = ports({"spec": pod})
        for probe in (container[key] for key in container if key.endswith("Probe")):
            for way in probe.keys() & {"tcpSocket", "httpGet", "grpc"}:
                assert probe[way]["port"] in {*own, *own.values()}
    for each in of_kind(objects, "StatefulSet"):
        [governing] = [one for one in of_kind(objects, "Service") if name_of(one) == each["spec"]["serviceName"]]
        assert governing["spec"]["clusterIP"] == "None"


@over_all
def test_router_replicas_have_one_address_for_http_and_one_for_grpc(overlay: str, components: tuple[str, ...]) -> None:
    objects = rendered(overlay, components)
    router = pods(objects)[ROUTER]
    services = [each for each in of_kind(objects, "Service") if selects(each["spec"]["selector"], router)]
    addresses = {name_of(each): [port["port"] for port in each["spec"]["ports"]] for each in services}
    assert addresses == {"baton": [8000], "baton-grpc": [50051]}


def ports(pod: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for each in pod["spec"]["containers"] for port in each["ports"]}


@over_all
def test_network_policies_allow_only_needed_connections(overlay: str, components: tuple[str, ...]) -> None:
    objects = rendered(overlay, components)
    assert {name: set(reaching(objects, name)) for name in pods(objects)} == {
        name: REACHED[name] for name in pods(objects)
    }


def reaching(objects: tuple[Object, ...], target: str) -> Iterator[tuple[str, str]]:
    """(set of pods, port) of each connection that the policies allow to `target`."""
    pod = pods(objects)[target]
    policies = [
        each["spec"]
        for each in of_kind(objects, "NetworkPolicy")
        if selects(each["spec"]["podSelector"]["matchLabels"], pod)
    ]
    assert policies, f"{target}: no policy selects it, so that everyone reaches it"
    for rule in (rule for each in policies for rule in each.get("ingress", ())):
        named = [port["port"] for port in rule.get("ports", ())]
        assert set(named) <= ports(pod).keys()
        for source in sources(objects, rule):
            yield from ((source, port) for port in named or ["*"])


def sources(objects: tuple[Object, ...], rule: Object) -> list[str]:
    if "from" not in rule:
        return ["anyone"]
    wanted = [each["podSelector"]["matchLabels"] for each in rule["from"]]
    return [name for name, pod in pods(objects).items() if any(selects(labels, pod) for labels in wanted)]


@over_all
def test_used_volumes_maps_and_claims_exist(overlay: str, components: tuple[str, ...]) -> None:
    objects = rendered(overlay, components)
    maps = {name_of(each) for each in of_kind(objects, "ConfigMap")}
    claims = {name_of(each) for each in of_kind(objects, "PersistentVolumeClaim")}
    for name, pod, container in containers(objects):
        volumes: dict[str, Any] = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys(), name
        assert all("emptyDir" in volumes[each["name"]] or each["readOnly"] for each in container["volumeMounts"]), name
        used = [
            each["persistentVolumeClaim"]["claimName"] for each in volumes.values() if "persistentVolumeClaim" in each
        ]
        assert set(used) <= claims, name
        assert {source["configMapRef"]["name"] for source in container.get("envFrom", ())} <= maps, name


@over_all
def test_objects_share_a_restricted_namespace(overlay: str, components: tuple[str, ...]) -> None:
    objects = rendered(overlay, components)
    [space] = of_kind(objects, "Namespace")
    assert space["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert {each["metadata"]["namespace"] for each in objects if each is not space} == {name_of(space)}
