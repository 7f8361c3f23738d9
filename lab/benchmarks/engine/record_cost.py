"""Time of a decode worker's records of a step, from which it says why a token was late, as a share of a step.

    .venv/bin/python -m baton.lab.benchmarks.engine.record_cost --step-ms 2.3 --json FILE

Records steps of `--sequences` answers with the worker's own code: the step record on the engine's thread, readings of
both threads' clocks, and the usual step time. Each round is the mean over 2 000 steps.
"""

import sys
import threading
import time

from baton.decode_worker.gaps import Moment, RequestNames, StepGaps
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.swap_space import SwapSpace
from baton.engine.request import Chunk, Plan, Sample, computed_token
from baton.engine.runner.step_records import DoneStep, HandOver, StepHistory, StepRecorder, StepTiming
from baton.engine.runner.thread_meter import ThreadMeter
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.batch import RunningBatch
from baton.lab.report.result import judge_rounds, make_result, read_arguments, write_result
from baton.text.cpu_wait import ProcessQueue

STEPS = 2_000
MOST_SHARE = 0.01  # promised share of a step


def steps_us(sequences: int, step_s: float) -> float:
    """Return the time that the records of one step take, in microseconds: the mean over STEPS steps."""
    sample = Sample(0, SamplingParams(max_tokens=1))
    plan = Plan(tuple(Chunk(number, [5], 100, [0], (sample,)) for number in range(sequences)))
    done = DoneStep(plan, tuple(computed_token(5, -0.5) for _ in plan.chunks))
    recorder = StepRecorder(RunningBatch(BlockPool(8), 4, SwapSpace(0)), ThreadMeter(beside=threading.get_native_id()))
    queue, history = ProcessQueue(), StepHistory()
    hand_over, gaps = HandOver(ThreadMeter(), queue.share), StepGaps(history, RequestNames())
    began_s, last = time.perf_counter(), Moment(0, time.monotonic())
    for _ in range(STEPS):
        now = time.monotonic()
        step = recorder.record(StepTiming(now - step_s, now), done)
        history.add(step)
        held = hand_over.take(0.0, now)
        gaps.begin(step)
        gaps.is_late(last, step)
        gaps.held(held)
        gaps.since(hand_over.since)
        last = Moment(step.number, step.ended)
    took_s = time.perf_counter() - began_s
    recorder.close()
    hand_over.close()
    queue.close()
    return took_s / STEPS * 1e6


def main() -> int:
    arguments = read_arguments(__doc__, sequences=4, step_ms=2.3, rounds=5)
    found = [steps_us(arguments.sequences, arguments.step_ms / 1e3) for _ in range(arguments.rounds)]
    shares = [each / arguments.step_ms / 1e3 for each in found]
    for each, share in zip(found, shares, strict=True):
        print(f"{each:.1f} us a step of {arguments.sequences} answers, {share:.2%} of {arguments.step_ms} ms")
    verdict = judge_rounds(f"at most {MOST_SHARE:.0%} of a step", [share <= MOST_SHARE for share in shares])
    rounds = [{"records_us": each, "share": share} for each, share in zip(found, shares, strict=True)]
    write_result(arguments.json, make_result(["engine", "decode_worker"], rounds, verdict))
    return 0


if __name__ == "__main__":
    sys.exit(main())
