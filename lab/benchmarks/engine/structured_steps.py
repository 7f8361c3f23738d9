"""What answers with a form cost the steps that they share with plain ones: one engine, in this process.

    .venv/bin/python -m baton.lab.benchmarks.engine.structured_steps --model FOLDER [--rounds 32]
                                                             [--temperature 1] [--json FILE]

Rounds with and without forms take turns. Time is CPU time of the engine's thread, which another program on the machine
does not add to; masks are made on other threads, and how long a step waits for them is bounded
(engine/sampling/constraint.py).
"""

import statistics
import time
from dataclasses import asdict, dataclass

from baton.engine import SamplingParams, StructuredOutputsParams
from baton.engine.offline.core import OfflineEngine
from baton.engine.offline.engine_args import EngineArgs
from baton.lab.benchmarks.report.result import read_arguments, write_result

PLAIN, COMPANIONS, STEPS, SKIPPED = 4, 4, 48, 8
PROMPT = "Answer in JSON, please: what do you know of it?"
FORMS = {
    "text": StructuredOutputsParams(regex="[a-z ]{4000}"),
    "json": StructuredOutputsParams(
        json={"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2000}
    ),
}


@dataclass(frozen=True, slots=True)
class Cost:
    form: str
    plain_step_ms: float  # CPU time of the engine's thread, median over rounds
    ratio: float  # with forms to without, of the two rounds that follow each other: median
    quartiles: tuple[float, float]  # of those ratios
    late_share: float  # of the tokens with a form that were drawn a step later than they might have been


def measure(engine: OfflineEngine, form: str, rounds: int, temperature: float = 1.0) -> Cost:
    _round(engine, FORMS[form], temperature)
    pairs = []
    late = 0
    for number in range(rounds):
        times = {}
        for formed in (True, False) if number % 2 else (False, True):
            times[formed], missed = _round(engine, FORMS[form] if formed else None, temperature)
            late += missed if formed else 0
        pairs.append(times)
    plain = statistics.median(times[False] for times in pairs)
    low, ratio, high = statistics.quantiles([times[True] / times[False] for times in pairs], n=4)
    return Cost(form, plain, ratio, (low, high), late / (rounds * COMPANIONS * STEPS))


def _round(engine: OfflineEngine, form: StructuredOutputsParams | None, temperature: float) -> tuple[float, int]:
    """Mean milliseconds of a step, and the tokens that companions were short of at the end."""
    plain = SamplingParams(temperature=temperature, max_tokens=400, ignore_eos=True)
    companion = (
        plain if form is None else SamplingParams(temperature=temperature, max_tokens=400, structured_outputs=form)
    )
    [prompt] = engine.reader.read([PROMPT])
    requests = [engine.request(prompt, params) for params in [plain] * PLAIN + [companion] * COMPANIONS]
    for request in requests:
        engine.add(request)
    for _ in range(SKIPPED):
        engine.step()
    began_s, made = time.thread_time(), 0
    for _ in range(STEPS):
        made += len(engine.step() or ())
    spent_ms = (time.thread_time() - began_s) * 1e3
    for request in requests:
        engine.scheduler.abort(request.request_id)
    return spent_ms / STEPS, (PLAIN + COMPANIONS) * STEPS - made


def main() -> None:
    arguments = read_arguments(__doc__, model=str, rounds=32, temperature=(1.0, "of all answers; 0 is greedy"))
    engine = OfflineEngine(EngineArgs(model=arguments.model, device="cpu", max_model_len=1024, quiet=True))
    engine.runner.warm_up()
    costs = [measure(engine, form, arguments.rounds, arguments.temperature) for form in FORMS]
    for cost in costs:
        print(
            f"{cost.form:>6}: a step takes {cost.plain_step_ms:.3f} ms beside plain answers, x {cost.ratio:.3f} "
            f"({cost.quartiles[0]:.3f} to {cost.quartiles[1]:.3f}) beside answers with a form, of whose tokens "
            f"{cost.late_share:.1%} came a step late"
        )
    write_result(arguments.json, {"costs": [asdict(cost) for cost in costs]})


if __name__ == "__main__":
    main()
