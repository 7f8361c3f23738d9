"""Pods for podman, made of the rendered objects."""

import pytest

from tests.deploy.play.pods import kinds_not_run, pod_of
from tests.fixtures.kubernetes import rendered

ADDRESS = "10.91.7.10"


def test_play_pod_has_name_address_and_known_fields() -> None:
    pod = pod_of(rendered("cpu"), "baton-decode", "baton-decode-1", ADDRESS)
    *maps, made = pod.objects
    [container] = made["spec"]["containers"]
    assert (made["kind"], made["metadata"]["name"], pod.container) == ("Pod", "baton-decode-1", "baton-decode-1-worker")
    assert {"name": "BATON_ADVERTISE", "value": ADDRESS} in container["env"]
    assert not {"readinessProbe", "livenessProbe", "startupProbe", "lifecycle", "ports"} & container.keys()
    assert container["securityContext"]["readOnlyRootFilesystem"] is True, "all else is as in the manifest"
    assert [each["metadata"]["name"].rpartition("-")[0] for each in maps] == ["baton-decode", "baton-worker"]


def test_play_pod_keeps_removed_fields() -> None:
    pod = pod_of(rendered("cpu"), "baton-router", "baton-router-1", ADDRESS)
    assert sorted(pod.services) == ["baton", "baton-grpc"] and pod.ports["http"] == 8000
    assert pod.before_stop[0] == "sleep" and pod.grace_s == 320 and pod.probe["httpGet"]["path"] == "/ready"


@pytest.mark.parametrize("kind", ["NetworkPolicy", "PodDisruptionBudget"])
def test_play_lists_kinds_that_are_not_run(kind: str) -> None:
    assert kind in kinds_not_run(rendered("cpu")) and "StatefulSet" not in kinds_not_run(rendered("cpu"))
