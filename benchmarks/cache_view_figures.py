"""From a router's trace: how often the cached tokens that it predicted are those that were found, and why if not."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

PREFIX = "baton.route."


@dataclass
class Side:
    """One kind of worker."""

    requests: int = 0
    equal: int = 0
    predicted_tokens: int = 0
    actual_tokens: int = 0
    causes: dict[str, int] = field(default_factory=dict)  # how many of the others

    def take(self, predicted: int, actual: int, ready: int) -> bool:
        self.requests += 1
        self.predicted_tokens += predicted
        self.actual_tokens += actual
        if predicted == actual:
            self.equal += 1
            return True
        cause = _cause(predicted, actual, ready)
        self.causes[cause] = self.causes.get(cause, 0) + 1
        return False


@dataclass
class Figures:
    """A request is equal if it is on every worker that looked its prompt up."""

    requests: int = 0
    equal: int = 0
    prefill: Side = field(default_factory=Side)
    decode: Side = field(default_factory=Side)

    @property
    def equal_share(self) -> float:
        return self.equal / self.requests if self.requests else 0.0


def _cause(predicted: int, actual: int, ready: int) -> str:
    """What must have happened between the decision and the look-up."""
    if actual > predicted:
        return "more had come"
    return "a prompt in flight did not bring it" if ready < predicted else "evicted meanwhile"


def figures(spans: Iterable[Mapping[str, Any]]) -> Figures:
    found = Figures()
    for span in spans:
        if span["name"] != "route.select":
            continue
        told = {name.removeprefix(PREFIX): value for name, value in span["attributes"].items()}
        equal = []
        if "prefill_cached_tokens" in told:
            ready = told["prefill_ready_tokens"]
            equal.append(found.prefill.take(told["prefill_hit_tokens"], told["prefill_cached_tokens"], ready))
        if "decode_cached_tokens" in told:
            predicted = told["decode_hit_tokens"]
            equal.append(found.decode.take(predicted, told["decode_cached_tokens"], ready=predicted))
        if equal:
            found.requests += 1
            found.equal += all(equal)
    return found


def read_spans(text: str) -> list[dict[str, Any]]:
    """Of a trace file; the last line may be half written."""
    complete, _, _ = text.rpartition("\n")
    return [json.loads(line) for line in complete.splitlines()]
