"""Loads that shift, and the costs of the workers that serve them.

For these loads, a prompt token takes 1 ms and a decode step 0.4 to 0.8 s: so slow that hours are simulated in minutes,
while the planner's own times are those of production.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.lab.benchmarks.serve.load import draw_length
from baton.lab.sizing.cluster import ClusterShape, SizingCall
from baton.lab.sizing.costs import Curve, MeasuredCosts, Overheads
from baton.lab.sizing.trials import SizingTargets
from baton.process.registry.worker_record import WorkerRole


class WorkerSpeed(NamedTuple):
    """Duration of a decode step of `batch` answers, a step of one answer taking half of it, and of a prompt token."""

    batch: int
    step_ms: float
    prompt_token_ms: float

    @property
    def costs(self) -> MeasuredCosts:
        one = self.step_ms / 2
        return MeasuredCosts(
            by_batch=Curve(((1.0, one), (self.batch, self.step_ms))),
            by_context=Curve(((1.0, one), (2.0, one))),
            by_prompt=Curve(((1000.0, 1000 * self.prompt_token_ms), (2000.0, 2000 * self.prompt_token_ms))),
            batch_context_tokens=1,
            step_tokens=512,
        )


SLOW = WorkerSpeed(8, 800.0, 1.0)
"""Speed of workers for LOADS."""
FAST = WorkerSpeed(12, 60.0, 0.25)
"""Speed of workers for traces, whose answers are twenty times as long as those of LOADS."""
OVERHEADS = Overheads(message_s=1e-3)
TARGETS = SizingTargets(ttft_ms=8000.0, tbt_ms=1200.0)
FLAGS = ("--ttft-slo-ms", str(TARGETS.ttft_ms), "--tbt-slo-ms", str(TARGETS.tbt_ms))
SHAPE = ClusterShape(
    3, 3, kv_tokens=60_000, context_tokens=8192, max_sequences=SLOW.batch, chunk_tokens=1024, report_s=0.5
)
NEED_WINDOW_S = 30.0
SPREAD = 0.5  # lengths differ from their mean by at most this share


class RequestMix(NamedTuple):
    """Rate of requests and mean lengths."""

    per_s: float
    prompt_tokens: int
    answer_tokens: int

    def times(self, factor: float) -> "RequestMix":
        return self._replace(per_s=self.per_s * factor)


BALANCED, PROMPTS, ANSWERS = RequestMix(0.8, 2000, 16), RequestMix(0.8, 3600, 6), RequestMix(0.8, 1200, 40)
"""Loads of six workers, best served by as many of each role, by four prefill workers, and by four decode workers."""


@dataclass(frozen=True, slots=True)
class ShiftingLoad:
    """Load over time. `shifts`: times at which a role begins to need one more worker, and that role."""

    seconds: float
    mix: Callable[[float], RequestMix]
    shifts: tuple[tuple[float, WorkerRole], ...] = ()

    def draw(self, seed: int) -> tuple[SizingCall, ...]:
        """Draw the calls of a Poisson process; no two prompts share a prefix."""
        chance, now, calls = random.Random(f"load {seed}"), 0.0, list[SizingCall]()
        while True:
            now += chance.expovariate(self.mix(now).per_s)
            if now >= self.seconds:
                return tuple(calls)
            mix = self.mix(now)
            prompt = chance.randbytes(draw_length(chance, mix.prompt_tokens, SPREAD))
            calls.append(SizingCall(now, prompt, draw_length(chance, mix.answer_tokens, SPREAD)))


def steps(*phases: tuple[float, RequestMix], shifts: tuple[tuple[float, WorkerRole], ...] = ()) -> ShiftingLoad:
    """Return the load of phases that last for some seconds each."""
    ends = [sum(seconds for seconds, _ in phases[: place + 1]) for place in range(len(phases))]

    def mix(now: float) -> RequestMix:
        return next((mix for end_s, (_, mix) in zip(ends, phases, strict=True) if now < end_s), phases[-1][1])

    return ShiftingLoad(ends[-1], mix, shifts)


def square_wave(period_s: float, seconds: float) -> ShiftingLoad:
    """Return a load that alternates between long prompts and long answers, each for half of a period."""
    return ShiftingLoad(seconds, lambda now: PROMPTS if now % period_s < period_s / 2 else ANSWERS)


def day_and_night(period_s: float, seconds: float) -> ShiftingLoad:
    """Return a load that turns gradually from long answers to long prompts and back."""

    def mix(now: float) -> RequestMix:
        day = (1 - math.cos(2 * math.pi * now / period_s)) / 2
        prompt, answer = (round(a + day * (b - a)) for a, b in zip(ANSWERS[1:], PROMPTS[1:], strict=True))
        return RequestMix(ANSWERS.per_s, prompt, answer)

    return ShiftingLoad(seconds, mix)


PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
LOADS = {
    "longer prompts": steps((60.0, BALANCED), (240.0, PROMPTS), shifts=((60.0, PREFILL),)),
    "longer answers": steps((60.0, BALANCED), (240.0, ANSWERS), shifts=((60.0, DECODE),)),
    "prompts, then answers": steps((240.0, PROMPTS), (240.0, ANSWERS), shifts=((0.0, PREFILL), (240.0, DECODE))),
    "day and night": day_and_night(600.0, 600.0),
    "square wave": square_wave(70.0, 490.0),
    "steady": steps((360.0, BALANCED)),
    "overload": steps((360.0, BALANCED.times(1.8))),
}
"""Loads of a fixed number of workers, whose roles follow."""
GROWING = steps((60.0, BALANCED.times(0.5)), (300.0, BALANCED.times(1.5)), (900.0, BALANCED.times(0.5)))
"""Load of autoscalers: three times the requests, then as few as before."""


def workers_needed(calls: Sequence[SizingCall], role: WorkerRole, speed: WorkerSpeed) -> list[tuple[float, float]]:
    """Return the number of workers that the calls keep busy, without waiting, in each NEED_WINDOW_S."""
    busy_ms = defaultdict[int, float](float)
    for call in calls:
        decoding_ms = call.answer_tokens * speed.step_ms / speed.batch
        busy_ms[int(call.at_s / NEED_WINDOW_S)] += (
            len(call.prompt) * speed.prompt_token_ms if role is PREFILL else decoding_ms
        )
    return [((place + 0.5) * NEED_WINDOW_S, busy_ms[place] / NEED_WINDOW_S / 1e3) for place in range(max(busy_ms) + 1)]
