"""Kubernetes' own cases, and what the autoscalers of deploy/kubernetes do with the published numbers.

The cases are those of Kubernetes' unit tests for External metrics and behaviour, by name and with the same numbers:
`pkg/controller/podautoscaler/replica_calculator_test.go` and `horizontal_test.go` (commit 4e62298c).
"""

import pytest

from baton.lab.planning.autoscaler import (
    DOWN,
    UP,
    AutoscalerSpec,
    ExternalMetric,
    HorizontalAutoscaler,
    Recommendation,
    ScaleEvent,
    ScalingPolicy,
    ScalingRules,
    read_autoscaler,
)
from baton.launch.paths import ROOT
from baton.process.registry.worker_record import WorkerRole

MANIFEST = ROOT / "deploy" / "kubernetes" / "components" / "autoscaling" / "autoscalers.yaml"
LONG_AGO_S = -1e9
FREE = AutoscalerSpec(
    1, 1000, (), ScalingRules(0.0, (ScalingPolicy("Pods", 1000, 15.0),)), ScalingRules(0.0, DOWN.policies)
)


def with_metrics(*metrics: ExternalMetric, least: int = 1, most: int = 1000) -> AutoscalerSpec:
    return AutoscalerSpec(least, most, metrics, FREE.up, FREE.down)


@pytest.mark.parametrize(
    ("name", "replicas", "ready", "target", "is_average", "expected"),
    [
        ("TestReplicaCalcScaleUpCMExternal", 1, 1, 4400, False, 2),
        ("TestReplicaCalcScaleUpCMExternalIgnoresUnreadyPods", 3, 1, 4400, False, 2),
        ("TestReplicaCalcScaleDownCMExternal", 5, 5, 14334, False, 3),
        ("TestReplicaCalcToleranceCMExternal", 3, 3, 8888, False, 3),
        ("TestReplicaCalcScaleUpPerPodCMExternal", 3, 3, 2150, True, 4),
        ("TestReplicaCalcScaleDownPerPodCMExternal", 5, 5, 2867, True, 3),
        ("TestReplicaCalcTolerancePerPodCMExternal", 3, 3, 2900, True, 3),
    ],
)
def test_external_metric_of_8600_proposes_what_kubernetes_proposes(
    name: str, replicas: int, ready: int, target: float, is_average: bool, expected: int
) -> None:
    assert ExternalMetric("qps", target, is_average).proposal(8600, replicas, ready) == expected, name


@pytest.mark.parametrize(
    ("name", "replicas", "other", "expected"),
    [("TestScaleUpOneMetricEmpty", 3, 4.0, 4), ("TestNoScaleDownOneMetricEmpty", 5, 3.0, 5)],
)
def test_missing_metric_prevents_only_fewer_replicas(name: str, replicas: int, other: float, expected: int) -> None:
    spec = with_metrics(ExternalMetric("qps", 1.0, True), ExternalMetric("missing", 1.0, True), least=2, most=6)
    assert HorizontalAutoscaler(spec).sync(replicas, replicas, {"qps": other}, 0.0) == expected, name
    assert HorizontalAutoscaler(spec).sync(replicas, replicas, {}, 0.0) == replicas


@pytest.mark.parametrize(
    ("name", "seen", "replicas", "proposed", "up_s", "down_s", "expected"),
    [
        ("empty recommendations for scaling down", [], 100, 5, 0, 0, 5),
        ("simple scale down stabilization", [(120, 4), (60, 5)], 100, 3, 0, 180, 5),
        ("simple scale up stabilization", [(120, 4), (60, 5)], 1, 7, 300, 0, 4),
        ("no scale down stabilization", [(120, 1), (60, 2)], 100, 3, 300, 0, 3),
        ("no scale up stabilization", [(120, 4), (60, 5)], 1, 3, 0, 300, 3),
        ("no scale down stabilization, reuse recommendation element", [(600, 10), (540, 9)], 100, 3, 0, 0, 3),
        ("no scale up stabilization, reuse recommendation element", [(600, 10), (540, 9)], 1, 100, 0, 0, 100),
        ("scale down stabilization, reuse", [(600, 10), (60, 4), (120, 5), (540, 9)], 100, 3, 0, 180, 5),
        ("scale up stabilization, reuse", [(6000, 10), (60, 6), (120, 5), (180, 9)], 1, 100, 300, 0, 5),
    ],
)
def test_stabilisation_equals_test_normalize_desired_replicas_with_behavior(
    name: str, seen: list[tuple[int, int]], replicas: int, proposed: int, up_s: float, down_s: float, expected: int
) -> None:
    up, down = ScalingRules(up_s, FREE.up.policies), ScalingRules(down_s, FREE.down.policies)
    spec = AutoscalerSpec(1, 1000, (ExternalMetric("n", 1.0, True),), up, down)
    scaler = HorizontalAutoscaler(spec, [Recommendation(-age_s, number) for age_s, number in seen])
    assert scaler.sync(replicas, replicas, {"n": proposed}, 0.0) == expected, name


def rules(pods: int = 0, pods_s: float = 60, percent: int = 0, percent_s: float = 60) -> ScalingRules:
    """Return `generateScalingRules` of Kubernetes' tests, without a window."""
    policies = (ScalingPolicy("Pods", pods, pods_s), ScalingPolicy("Percent", percent, percent_s))
    return ScalingRules(0.0, tuple(each for each in policies if each.value))


@pytest.mark.parametrize(
    ("replicas", "desired", "limits", "changes", "policy", "expected"),
    [
        (5, 7, (3, 8), (), UP, 7),
        (3, 1, (2, 8), (), DOWN, 2),
        (20, 1000, (1, 10), (), UP, 10),
        (100, 1000, (100, 150), (), UP, 150),
        (3, 1000, (1, 2000), (), rules(percent=1), 4),
        (10, 50, (1, 1000), (), UP, 20),
        (10, 500, (1, 1000), (), rules(100, percent=100), 110),
        (10, 500, (1, 1000), (), rules(2, percent=100), 20),
        (10, 50, (1, 1000), (), rules(100), 50),
        (10, 50, (1, 1000), (), rules(30), 40),
        (10, 50, (1, 1000), (), rules(percent=200), 30),
        (100, 2, (1, 1000), (), rules(20, percent=1), 80),
        (100, 2, (1, 1000), (), rules(2, percent=1), 98),
        (10, 0, (1, 1000), (), rules(100), 1),
        (10, 2, (5, 1000), (), rules(percent=100), 5),
        (10, 2, (1, 1000), (), rules(5), 5),
        (10, 5, (1, 1000), (), rules(percent=50), 5),
        (100, 500, (1, 200), (1, 5, 9), rules(300), 200),
        (100, 500, (1, 1000), (1, 5, 9), rules(5, 120), 100),
        (100, 500, (1, 1000), (1, 5, 9), rules(150, 120), 235),
        (100, 500, (1, 1000), (1, 5, 9), rules(percent=200, percent_s=120), 255),
        (100, 0, (5, 1000), (-1, -5, -9), rules(130, 120), 5),
        (100, 2, (1, 1000), (-1, -5, -9), rules(5, 120), 100),
        (100, 0, (1, 1000), (-2, -4, -6), rules(percent=50, percent_s=120), 56),
        (100, 0, (1, 1000), (-10, -10, -10), rules(percent=10, percent_s=120), 100),
        (10, 5, (1, 1000), (-10, -10, -10), rules(percent=1000, percent_s=120), 5),
        (100, 200, (1, 1000), (8, 12, 9, 11), rules(1000, 30, 100, 60), 200),
        (1, 1000, (1, 1000), (), ScalingRules(0.0, rules(2, percent=50).policies, "Min"), 2),
        (5, 0, (1, 1000), (), ScalingRules(0.0, rules(2, percent=50).policies, "Min"), 3),
        (5, 9, (1, 1000), (), ScalingRules(0.0, UP.policies, "Disabled"), 5),
    ],
)
def test_rates_equal_test_scaling_with_rules(
    replicas: int, desired: int, limits: tuple[int, int], changes: tuple[int, ...], policy: ScalingRules, expected: int
) -> None:
    """`changes`: earlier ones, in the middle of equal parts of the last 120 s."""
    part_s = 120.0 / max(1, len(changes))
    events = [ScaleEvent(-120.0 + part_s * (place + 0.5), change) for place, change in enumerate(changes)]
    policy = ScalingRules(0.0, policy.policies, policy.select)
    spec = AutoscalerSpec(*limits, (ExternalMetric("n", 1.0, True),), policy, policy)
    scaler = HorizontalAutoscaler(spec, [Recommendation(LONG_AGO_S, replicas)], events)
    assert scaler.sync(replicas, replicas, {"n": desired}, 0.0) == expected


@pytest.mark.parametrize("role", WorkerRole)
def test_our_autoscalers_follow_each_step_of_the_desired_number_of_their_role(role: WorkerRole) -> None:
    spec = read_autoscaler(MANIFEST, f"baton-{role}")
    series = f'baton_desired_replicas{{role="{role}"}}'
    for number in range(spec.least, spec.most):
        values = {each.series: 0.0 for each in spec.metrics}
        assert HorizontalAutoscaler(spec).sync(number, number, values | {series: number + 1}, 0.0) == number + 1
        scaler, values = HorizontalAutoscaler(spec), values | {series: number}
        numbers = [scaler.sync(number + 1, number + 1, values, now) for now in (0.0, 285.0, 300.0)]
        assert numbers == [number + 1, number + 1, number], "fewer after five minutes, and within the tolerance of none"


def test_our_autoscalers_add_two_pods_in_30_s_and_remove_one_in_60_s() -> None:
    spec = read_autoscaler(MANIFEST, "baton-decode")
    series = 'baton_desired_replicas{role="decode"}'
    scaler, number = HorizontalAutoscaler(spec), 2
    grown, shrunk = list[int](), list[int]()
    for tick in range(6):
        number = scaler.sync(number, number, {each.series: 0.0 for each in spec.metrics} | {series: 8}, 15.0 * tick)
        grown.append(number)
    for tick in range(6, 40):
        number = scaler.sync(number, number, {each.series: 0.0 for each in spec.metrics} | {series: 2}, 15.0 * tick)
        shrunk.append(number)
    assert grown == [4, 4, 6, 6, 8, 8]
    assert shrunk[:19] == [8] * 19 and shrunk[19::4][:4] == [7, 6, 5, 4]


def test_reading_an_unknown_set_or_target_type_is_rejected() -> None:
    with pytest.raises(ValueError, match="no HorizontalPodAutoscaler of baton-redis"):
        read_autoscaler(MANIFEST, "baton-redis")
    with pytest.raises(KeyError, match="external"):
        read_autoscaler(MANIFEST, "baton-router")
