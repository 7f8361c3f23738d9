"""Record of what decided about the newest requests and steps (record.json), which `baton replay` reads. Pure.

It consists of the timelines of routers and workers, with the inputs of each placement. Ids of blocks are replaced by
numbers in the order of their first appearance, so that they say which prompts share blocks and nothing else. Token ids
and digests of steps, with which guesses of a prompt could be checked, are in it only if the caller asks for tokens.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.client.timelines import ProcessTimeline
from baton.router.trace.decided import BLOCK_ID_BYTES
from baton.router.types.plain import to_plain
from baton.versions import OWN

FORMAT = 1


@dataclass(frozen=True, slots=True)
class FixedNames:
    """JSON value whose names are those of fields: only its texts may be secret."""

    value: Any

    def cleaned(self, clean: Callable[[str], str]) -> bytes:
        """Return the value as JSON, with `clean` applied to each text."""
        return json.dumps(_cleaned(self.value, clean), separators=(",", ":")).encode()


def decided_record(
    routers: Iterable[Sequence[ProcessTimeline]], most_bytes: int, with_tokens: bool = False
) -> Mapping[str, Any]:
    """Return the record of all routers and their workers, as many of the newest requests and steps as fit."""
    numbers: dict[str, int] = {}
    by_endpoint: dict[tuple[str, str], ProcessTimeline] = {}
    for number, timelines in enumerate(routers):
        for each in timelines:
            key = (each.name, each.endpoint) if each.endpoint else (each.name, f"router {number}")
            known = by_endpoint.get(key)
            by_endpoint[key] = each if known is None or known.failure else known
    kept = 1.0
    while True:
        processes = [_process(each, kept, numbers, with_tokens) for each in by_endpoint.values()]
        record = {"format": FORMAT, "release": OWN.release, "processes": processes}
        if len(json.dumps(record, separators=(",", ":"))) <= most_bytes:
            return record
        kept /= 2


def _process(timeline: ProcessTimeline, kept: float, numbers: dict[str, int], with_tokens: bool) -> Mapping[str, Any]:
    steps = _newest(timeline.steps, kept)
    plain = to_plain(
        replace(
            timeline,
            requests=tuple(replace(each, stalls=(), stages=()) for each in _newest(timeline.requests, kept)),
            steps=steps if with_tokens else tuple(replace(step, digest=0) for step in steps),
            worker_requests=_newest(timeline.worker_requests, kept),
        )
    )
    decided = [*plain.get("requests", ()), plain]
    for each in decided:
        if "decided" in each:
            each["decided"] = json.loads(each["decided"])
    for each in plain.get("requests", ()):
        if (found := each.get("decided", {})).get("blocks") is not None:
            found["blocks"] = _numbered(found["blocks"], numbers)
    return dict(plain)


def _newest(values: tuple[Any, ...], kept: float) -> tuple[Any, ...]:
    return values[-max(1, round(kept * len(values))) :]


def _numbered(blocks: str, numbers: dict[str, int]) -> list[int]:
    digits = 2 * BLOCK_ID_BYTES
    names = [blocks[begin : begin + digits] for begin in range(0, len(blocks), digits)]
    return [numbers.setdefault(name, len(numbers)) for name in names]


def _cleaned(value: Any, clean: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {key: _cleaned(each, clean) for key, each in value.items()}
    if isinstance(value, list):
        return [_cleaned(each, clean) for each in value]
    return value
