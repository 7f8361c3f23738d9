"""What is promised of the gateway beside clients that mean no good, and which of it a run's figures break. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

MOST_P50_RATIO = 1.05
MOST_P99_RATIO = 1.25
MOST_GROWTH_MIB = 256.0
"""Of the gateway and its helpers: two of those, with 40 MiB each, and the bodies and messages that are in hand."""

TOLD: Mapping[str, frozenset[str]] = {
    "nothing": frozenset(),
    "malformed": frozenset({"400"}),
    "large": frozenset({"200", "400", "413", "503"}),
    "large_messages": frozenset({"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}),
    "slow_readers": frozenset({"cut off"}),
    "half_open": frozenset({"408", "cut off", "reset by us"}),
    "slow_loris": frozenset({"408", "cut off"}),
}
"""What each kind of abuser may be answered: a clear error, or the end of its connection."""


def broken(kind: str, found: Mapping[str, Any]) -> Iterator[str]:
    """The promises that these figures break, in words."""
    for name, most in (("p50_ratio", MOST_P50_RATIO), ("p99_ratio", MOST_P99_RATIO)):
        if found[name] > most:
            yield f"the neighbours' {name} is {found[name]}, and may be {most}"
    if found["growth_mib_beside"] > MOST_GROWTH_MIB:
        yield f"memory grew by {found['growth_mib_beside']} MiB, and may by {MOST_GROWTH_MIB:g}"
    if foreign := set(found["told"]) - TOLD[kind]:
        yield f"was told {sorted(foreign)}"
    if kind != "nothing" and not found["told"]:
        yield "was told nothing"
