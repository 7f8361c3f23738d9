"""Pods for `podman kube play`: rendered objects with fields that podman does not know removed or replaced. Pure."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fixtures.kubernetes import Object, name_of, of_kind, pods, selects

DONE_OUTSIDE = ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "ports")
"""Fields that this program handles instead of the kubelet, and ports, which podman would open on the machine."""


@dataclass(frozen=True, slots=True)
class Pod:
    """Pod to start."""

    name: str
    owner: str
    """Name of its Deployment or StatefulSet."""
    address: str
    services: tuple[str, ...]
    """Services that select the pod: its DNS names."""
    objects: tuple[Object, ...]
    """ConfigMaps of the pod, and the pod."""
    ports: Mapping[str, int]
    """Ports by name."""
    probe: Mapping[str, Any]
    """Readiness probe."""
    before_stop: tuple[str, ...]
    """Command of the preStop hook."""
    grace_s: int

    @property
    def container(self) -> str:
        """Name of the container in podman."""
        return f"{self.name}-{self.objects[-1]['spec']['containers'][0]['name']}"


def pod_of(
    objects: tuple[Object, ...], owner: str, name: str, address: str, secrets: Mapping[str, Path] | None = None
) -> Pod:
    """Return the pod of a set. `secrets`: folders with the files of each secret."""
    template = copy.deepcopy(pods(objects)[owner])
    spec = template["spec"]
    [container] = spec["containers"]
    hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ())
    probe = container["readinessProbe"]
    ports = {each["name"]: int(each["containerPort"]) for each in container["ports"]}
    for key in DONE_OUTSIDE:
        container.pop(key, None)
    for variable in container.get("env", ()):
        if variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") == "status.podIP":
            del variable["valueFrom"]  # podman gives no pod its address in advance; here the pod has a fixed one
            variable["value"] = address
    for volume in spec["volumes"]:
        if "secret" in volume:
            volume["hostPath"] = {"path": str((secrets or {})[volume.pop("secret")["secretName"]]), "type": "Directory"}
    services = tuple(
        name_of(each) for each in of_kind(objects, "Service") if selects(each["spec"]["selector"], template)
    )
    used = {source["configMapRef"]["name"] for source in container.get("envFrom", ())}
    maps = [each for each in of_kind(objects, "ConfigMap") if name_of(each) in used]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"] | {"name": name}, "spec": spec}
    grace_s = int(spec["terminationGracePeriodSeconds"])
    return Pod(name, owner, address, services, (*maps, pod), ports, probe, tuple(hook), grace_s)


def kinds_not_run(objects: Sequence[Object]) -> list[str]:
    """Return the kinds of objects whose controllers are missing here."""
    stood_in = {"Deployment", "StatefulSet", "Service", "ConfigMap", "PersistentVolumeClaim"}
    return sorted({each["kind"] for each in objects} - stood_in)
