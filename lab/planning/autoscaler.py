"""Kubernetes' HorizontalPodAutoscaler (autoscaling/v2) with External metrics, configured by its manifest. Pure.

Follows `pkg/controller/podautoscaler` of Kubernetes 1.27 and later: the highest number that a metric proposes counts; a
missing metric prevents fewer replicas; recommendations are stabilised over a window; policies limit the rate of change.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

SYNC_PERIOD_S, TOLERANCE = 15.0, 0.1
"""Defaults of kube-controller-manager."""


class ScalingPolicy(NamedTuple):
    """Limit of the change within `period_s`. `kind`: Pods or Percent."""

    kind: str
    value: int
    period_s: float


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """Rules of one direction. `select`: Max, Min or Disabled, which of the policies' changes counts."""

    window_s: float
    policies: tuple[ScalingPolicy, ...]
    select: str = "Max"


UP = ScalingRules(0.0, (ScalingPolicy("Pods", 4, 15.0), ScalingPolicy("Percent", 100, 15.0)))
DOWN = ScalingRules(300.0, (ScalingPolicy("Percent", 100, 15.0),))
"""Defaults of Kubernetes."""


@dataclass(frozen=True, slots=True)
class ExternalMetric:
    """Metric and its target. `is_average`: the target is a value per replica (AverageValue), else of all (Value)."""

    series: str  # name with its selector, such as `queue{role="decode"}`
    target: float
    is_average: bool

    def proposal(self, value: float, replicas: int, ready: int) -> int:
        """Return the number of replicas that brings the metric to its target. `ready`: number of ready pods."""
        ratio = value / (self.target * (replicas if self.is_average else 1))
        if abs(1.0 - ratio) <= TOLERANCE:
            return replicas
        return math.ceil(value / self.target) if self.is_average else math.ceil(ratio * ready)


@dataclass(frozen=True, slots=True)
class AutoscalerSpec:
    least: int
    most: int
    metrics: tuple[ExternalMetric, ...]
    up: ScalingRules = UP
    down: ScalingRules = DOWN


class Recommendation(NamedTuple):
    at_s: float
    replicas: int


class ScaleEvent(NamedTuple):
    at_s: float
    change: int


@dataclass(slots=True)
class HorizontalAutoscaler:
    """Controller of one set. Call `sync` once per SYNC_PERIOD_S."""

    spec: AutoscalerSpec
    recommendations: list[Recommendation] = field(default_factory=list)
    events: list[ScaleEvent] = field(default_factory=list)

    def sync(self, replicas: int, ready: int, values: Mapping[str, float], now: float) -> int:
        """Return the new number of replicas. `values`: available metrics by series."""
        spec, self.recommendations = self.spec, self.recommendations or [Recommendation(now, replicas)]
        desired = min(max(replicas, spec.least), spec.most)
        if desired == replicas:
            proposed = self._proposed(replicas, ready, values)
            if proposed is not None:
                desired = self._limited(replicas, self._stabilised(replicas, proposed, now), now)
        if desired != replicas:
            self.events.append(ScaleEvent(now, desired - replicas))
        return desired

    def _proposed(self, replicas: int, ready: int, values: Mapping[str, float]) -> int | None:
        """Return the highest proposal; None if all metrics are missing, or some while the others propose fewer."""
        known = [each for each in self.spec.metrics if each.series in values]
        highest = max((each.proposal(values[each.series], replicas, ready) for each in known), default=None)
        lacks = len(known) < len(self.spec.metrics)
        return None if highest is not None and lacks and highest < replicas else highest

    def _stabilised(self, replicas: int, proposed: int, now: float) -> int:
        """Return the number closest to `replicas` between the lowest and highest recommendations of the windows."""
        recent = (
            [each.replicas for each in self.recommendations if each.at_s > now - rules.window_s]
            for rules in (self.spec.up, self.spec.down)
        )
        lowest, highest = (choose([proposed, *seen]) for choose, seen in zip((min, max), recent, strict=True))
        self.recommendations.append(Recommendation(now, proposed))
        return min(max(replicas, lowest), highest)

    def _limited(self, replicas: int, desired: int, now: float) -> int:
        spec = self.spec
        if desired > replicas:
            return min(desired, spec.most, max(replicas, self._limit(spec.up, 1, replicas, now)))
        return max(desired, spec.least, min(replicas, self._limit(spec.down, -1, replicas, now)))

    def _limit(self, rules: ScalingRules, sign: int, replicas: int, now: float) -> int:
        """Return the furthest number that the policies allow in the direction of `sign`."""
        if rules.select == "Disabled":
            return replicas
        limits = list[int]()
        for policy in rules.policies:
            began = replicas - sum(each.change for each in self.events if each.at_s > now - policy.period_s)
            if policy.kind == "Pods":
                limits.append(began + sign * policy.value)
            else:
                by_share = began * (1 + sign * policy.value / 100)
                limits.append(math.ceil(by_share) if sign > 0 else int(by_share))
        return (max if (sign > 0) == (rules.select == "Max") else min)(limits)


def read_autoscaler(manifest: Path, target: str) -> AutoscalerSpec:
    """Read the autoscaler of the set named `target`. Raises: KeyError, ValueError if it is missing or unsupported."""
    objects = (each["spec"] for each in yaml.safe_load_all(manifest.read_text()) if _is_autoscaler(each))
    spec = next((each for each in objects if each["scaleTargetRef"]["name"] == target), None)
    if spec is None:
        raise ValueError(f"{manifest.name} has no HorizontalPodAutoscaler of {target}")
    behavior = spec.get("behavior", {})
    up, down = (_rules(behavior.get(key, {}), usual) for key, usual in (("scaleUp", UP), ("scaleDown", DOWN)))
    return AutoscalerSpec(spec.get("minReplicas", 1), spec["maxReplicas"], _metrics(spec["metrics"]), up, down)


def _is_autoscaler(each: Mapping[str, Any]) -> bool:
    return (each["kind"], each["apiVersion"]) == ("HorizontalPodAutoscaler", "autoscaling/v2")


def _metrics(metrics: Sequence[Mapping[str, Any]]) -> tuple[ExternalMetric, ...]:
    return tuple(_metric(each["external"]["metric"], each["external"]["target"]) for each in metrics)


def _metric(metric: Mapping[str, Any], target: Mapping[str, Any]) -> ExternalMetric:
    labels = metric.get("selector", {}).get("matchLabels", {})
    selector = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
    is_average = {"AverageValue": True, "Value": False}[target["type"]]
    quantity = str(target["averageValue" if is_average else "value"])
    value = float(quantity[:-1]) / 1e3 if quantity.endswith("m") else float(quantity)
    return ExternalMetric(metric["name"] + (f"{{{selector}}}" if selector else ""), value, is_average)


def _rules(rules: Mapping[str, Any], usual: ScalingRules) -> ScalingRules:
    policies = (
        tuple(ScalingPolicy(each["type"], each["value"], each["periodSeconds"]) for each in rules["policies"])
        if "policies" in rules
        else usual.policies
    )
    return replace(
        usual,
        window_s=rules.get("stabilizationWindowSeconds", usual.window_s),
        policies=policies,
        select=rules.get("selectPolicy", usual.select),
    )
