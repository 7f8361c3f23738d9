"""Check that every answer is the same to the last bit, however it is computed.

Random requests are computed with and without drafts, next to up to 64 other requests, in steps of 16 to 512 tokens, and
in stacks of real processes whose workers are killed.

    .venv/bin/python -m baton.lab.chaos.exactness [--model FOLDER] [--requests 2000] [--seed 0]
                                            [--dtypes float32 bfloat16] [--json FILE]

Expected answers come from an engine without drafts that computes each request alone. In float32 the oracle (oracle.py)
compares them with transformers and the second sampler. Tokens, texts, end reasons and log-probabilities, in the
precision in which clients receive them, must be equal. Exits with 1 on any difference.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.lab.chaos.exactness.answers import Answers, difference
from baton.lab.chaos.exactness.courses import Course, CourseAnswers, alone, at_once, courses, in_stack
from baton.lab.chaos.exactness.oracle import Oracle, OracleTally
from baton.lab.chaos.exactness.requests import ExactRequest, random_requests
from baton.lab.chaos.history import ChaosCase
from baton.lab.report.result import SERVICE, Columns, judge_rounds, make_result, read_arguments, table, write_result
from baton.launch import CommandFailed
from baton.launch.tiny_checkpoint import write_tiny_checkpoint


@dataclass(frozen=True, slots=True)
class CourseResult:
    """Result of one course (a way to compute all requests), with counters of events that could have changed answers."""

    course: str
    dtype: str
    requests: int
    differing: int
    tokens: int
    drafted_tokens: int
    accepted_tokens: int
    continued: int
    kills: int
    preemptions: int
    seconds: float


def compare(
    course: Course, asked: Sequence[ExactRequest], expected: Answers, made: CourseAnswers, seconds: float
) -> CourseResult:
    """Compare the answers of a course with the expected answers, and print each request whose answer differs."""
    differing = 0
    for request, before, after in zip(asked, expected, made.answers, strict=True):
        if found := difference(before, after):
            differing += 1
            print(f"{course.name}, {course.dtype}: {request}: {found}")
    tokens = sum(len(choice.token_ids) for answer in expected for choice in answer)
    return CourseResult(
        course.name,
        course.dtype,
        len(asked),
        differing,
        tokens,
        made.drafted_tokens,
        made.accepted_tokens,
        made.continued,
        made.kills,
        made.preemptions,
        round(seconds, 1),
    )


def hold_against_oracle(model: Path, asked: Sequence[ExactRequest], answers: Answers) -> OracleTally:
    """Check float32 answers with the oracle. Raises: OracleDisagrees.

    bfloat16 answers are not checked, since transformers rounds differently.
    """
    oracle = Oracle(model)
    for number, (request, answer) in enumerate(zip(asked, answers, strict=True)):
        prompt = tuple(oracle.tokenizer.encode(request.prompt))
        oracle.expect(ChaosCase(f"request {number}", prompt, request.options), answer)
    return oracle.tally


def measure(model: Path, dtype: str, asked: Sequence[ExactRequest], seed: int) -> list[CourseResult]:
    began_s = time.monotonic()
    expected = alone(model, dtype, asked)
    print(f"{dtype}: {len(asked)} requests alone in {time.monotonic() - began_s:.0f} s", flush=True)
    if dtype == "float32":
        print(f"{dtype}: answers match transformers: {hold_against_oracle(model, asked, expected)}", flush=True)
    outcomes = []
    for course in courses(dtype):
        began_s, draw = time.monotonic(), random.Random(f"{course.name} {seed}")
        if course.layout is None:
            made = at_once(model, course, asked)
        else:
            made = asyncio.run(in_stack(model, course, course.layout, asked, draw))
        outcomes.append(compare(course, asked, expected, made, time.monotonic() - began_s))
        print(table(outcomes[-1:], COLUMNS), flush=True)
    return outcomes


COLUMNS: Columns[CourseResult] = {
    "course": lambda each: each.course,
    "dtype": lambda each: each.dtype,
    "requests": lambda each: f"{each.requests:,}",
    "tokens": lambda each: f"{each.tokens:,}",
    "differing": lambda each: each.differing,
    "drafted": lambda each: f"{each.drafted_tokens:,}",
    "drawn": lambda each: f"{each.accepted_tokens:,}",
    "continued": lambda each: each.continued,
    "kills": lambda each: each.kills,
    "preempted": lambda each: each.preemptions,
    "s": lambda each: f"{each.seconds:.0f}",
}


def main() -> None:
    given = read_arguments(
        __doc__,
        model=(None, "folder of a checkpoint; default: a tiny one of random weights"),
        requests=2000,
        seed=0,
        dtypes=(["float32", "bfloat16"], "element types to compute in"),
    )
    asked = random_requests(given.seed, given.requests)
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or Path(folder) / "tiny"
        if given.model is None:
            write_tiny_checkpoint(model)
        outcomes = [each for dtype in given.dtypes for each in measure(model, dtype, asked, given.seed)]
    print(table(outcomes, COLUMNS))
    verdict = judge_rounds("no answer of a course differs", (each.differing == 0 for each in outcomes), "courses")
    rounds = [{f"{each.course}, {each.dtype}": asdict(each) for each in outcomes}]
    write_result(given.json, make_result(SERVICE, rounds, verdict, seed=given.seed))
    if differing := sum(each.differing for each in outcomes):
        raise CommandFailed(f"{differing} answers differ")


if __name__ == "__main__":
    main()
