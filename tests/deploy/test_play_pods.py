"""Pods for podman, made of the rendered objects."""

import pytest

from tests.deploy.play.pods import kinds_not_run, pod_of
from tests.fixtures.kubernetes import rendered

ADDRESS = "10.91.7.10"


def test_a_pod_has_its_name_its_address_and_nothing_that_podman_does_not_know() -> None:
    pod = pod_of(rendered("cpu"), "baton-decode", "baton-decode-1", ADDRESS)
    *maps, made = pod.objects
    [container] = made["spec"]["containers"]
    assert (made["kind"], made["metadata"]["name"], pod.container) == ("Pod", "baton-decode-1", "baton-decode-1-worker")
    assert {"name": "BATON_ADVERTISE", "value": ADDRESS} in container["env"]
    assert not {"readinessProbe", "livenessProbe", "startupProbe", "lifecycle", "ports"} & container.keys()
    assert container["securityContext"]["readOnlyRootFilesystem"] is True, "all else is as in the manifest"
    assert [each["metadata"]["name"].rpartition("-")[0] for each in maps] == ["baton-decode", "baton-worker"]


def test_what_was_taken_out_is_kept_for_the_program() -> None:
    pod = pod_of(rendered("cpu"), "baton-router", "baton-router-1", ADDRESS)
    assert sorted(pod.services) == ["baton", "baton-grpc"] and pod.ports["http"] == 8000
    assert pod.before_stop[0] == "sleep" and pod.grace_s == 320 and pod.probe["httpGet"]["path"] == "/ready"


def test_the_rendered_objects_stay_as_they_are() -> None:
    pod_of(rendered("cpu"), "baton-router", "baton-router-1", ADDRESS)
    again = pod_of(rendered("cpu"), "baton-router", "baton-router-2", ADDRESS)
    assert again.probe and again.ports


@pytest.mark.parametrize("kind", ["NetworkPolicy", "PodDisruptionBudget"])
def test_kinds_that_nothing_stands_in_for_are_listed(kind: str) -> None:
    assert kind in kinds_not_run(rendered("cpu")) and "StatefulSet" not in kinds_not_run(rendered("cpu"))
