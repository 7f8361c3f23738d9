"""Durations of steps, from curves that were measured on the device, and of the overheads around steps. Pure.

A step with answers takes as long as the measured decode step of that many sequences, corrected for their context. A
chunk of a prompt from token a to token b adds the measured time to first token of b tokens minus that of a tokens. A
step without answers adds a fixed part, extrapolated from the two shortest measured prompts.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.engine.request import Plan

BY_BATCH, BY_CONTEXT, BY_PROMPT = (
    "decode step against batch",
    "decode step against context, batch 1",
    "time to first token",
)
"""The names of the curves in the file that `baton bench curves --folder` writes."""
USUAL_STEP_TOKENS = 512


class CurvesError(Exception):
    """Error: a file of curves is incomplete or invalid."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Linear interpolation between two or more measured points, and extrapolation beyond them."""

    points: tuple[tuple[float, float], ...]

    def at(self, x: float) -> float:
        place = min(max(1, bisect_right(self.points, x, key=lambda point: point[0])), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[place - 1], self.points[place]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

    @property
    def at_zero(self) -> float:
        """Return the value at 0, which is never negative."""
        return max(0.0, self.at(0.0))


class StepCosts(Protocol):
    """Durations of steps."""

    def seconds(self, plan: Plan) -> float:
        """Return the duration of a step."""


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Measured times in milliseconds: of a step by number of sequences and by context tokens, of a prompt by length."""

    by_batch: Curve
    by_context: Curve
    by_prompt: Curve
    batch_context_tokens: int  # context of each sequence in `by_batch`
    step_tokens: int  # prompt tokens in each step of `by_prompt`

    def seconds(self, plan: Plan) -> float:
        answers = [chunk for chunk in plan.chunks if len(chunk.token_ids) == 1 and chunk.samples]
        prompts = [chunk for chunk in plan.chunks if len(chunk.token_ids) != 1 or not chunk.samples]
        ms = self._answers_ms(len(answers), sum(chunk.end for chunk in answers))
        if prompts and not answers:
            ms += self.by_prompt.at_zero
        ms += sum(self._prompt_ms(chunk.end) - self._prompt_ms(chunk.start) for chunk in prompts)
        return max(0.0, ms) / 1e3

    @property
    def prefill_tokens_per_s(self) -> float:
        """Return the prefill rate of the longest measured prompt."""
        tokens, ms = self.by_prompt.points[-1]
        return 1e3 * tokens / ms

    def decode_step_s(self, answers: int) -> float:
        """Return the duration of a step that decodes `answers` sequences, each with the context of `by_batch`."""
        return self.by_batch.at(answers) / 1e3

    def _answers_ms(self, answers: int, context_tokens: int) -> float:
        if not answers:
            return 0.0
        (low, _), (high, _) = self.by_context.points[0], self.by_context.points[-1]
        per_token_ms = max(0.0, (self.by_context.at(high) - self.by_context.at(low)) / (high - low))
        beyond_tokens = context_tokens - answers * self.batch_context_tokens
        return max(self.by_context.at_zero, self.by_batch.at(answers) + per_token_ms * beyond_tokens)

    def _prompt_ms(self, tokens: int) -> float:
        """Return the time to compute the first `tokens` of a prompt, without the fixed time of each step."""
        fixed_ms, steps = self.by_prompt.at_zero, -(-tokens // self.step_tokens)
        return self.by_prompt.at(tokens) - fixed_ms * max(1, steps) if tokens else 0.0


@dataclass(frozen=True, slots=True)
class Overheads:
    """Measured overheads around the steps.

    The defaults were measured on an idle stack on two cores of an AMD EPYC (Zen 4), with gRPC on loopback and copies by
    shared memory (`cluster/sizing.py` at the tag `settled-benchmarks`).
    """

    message_s: float = 8e-4  # from serialising a message until its handler starts in the other process
    step_s: float = 4.7e-4  # between two steps of a worker
    copy_s: float = 0.0  # fixed cost of one copy of KV
    kv_bytes_per_s: float = 2.5e9
    kv_bytes_per_token: float = 23_040.0


def read_costs(plain: Mapping[str, Any]) -> MeasuredCosts:
    """Read the JSON of `baton bench curves`. Raises: CurvesError."""
    curves = {each.get("name"): each for each in plain.get("curves", ())}
    missing = [name for name in (BY_BATCH, BY_CONTEXT, BY_PROMPT) if name not in curves]
    if missing:
        raise CurvesError(f"no curve is named {missing[0]!r}: `baton bench curves --folder` writes the file")
    try:
        by_batch, by_context, by_prompt = (
            _curve(name, curves[name]["points"]) for name in (BY_BATCH, BY_CONTEXT, BY_PROMPT)
        )
        context_tokens = int(plain["batch_context_tokens"])
        step_tokens = int(plain.get("step_tokens", USUAL_STEP_TOKENS))
    except (KeyError, TypeError, ValueError) as error:
        raise CurvesError(f"the curves are not as `baton bench curves` writes them: {error!r}") from error
    return MeasuredCosts(by_batch, by_context, by_prompt, context_tokens, step_tokens)


def _curve(name: str, points: Sequence[Mapping[str, Any]]) -> Curve:
    """Read one curve. Raises: CurvesError."""
    found = sorted((float(point["x"]), float(point["measured_ms"])) for point in points)
    if len({x for x, _ in found}) < 2:
        raise CurvesError(f"the curve {name!r} needs two points or more, and has {len(found)}")
    if min(ms for _, ms in found) <= 0:
        raise CurvesError(f"the curve {name!r} has a time of 0 ms or less")
    return Curve(tuple(found))
