"""Ways to compute the same requests: one by one, concurrently in one engine, and in stacks whose workers are killed."""

import asyncio
import random
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.client import AsyncAdminClient, AsyncBatonClient, RecentRequest
from baton.engine import LLM
from baton.lab.chaos.exactness.answers import Answers, answered_here, answered_there
from baton.lab.chaos.exactness.requests import ExactRequest, sampling_params
from baton.lab.chaos.stack import HOST, ChaosStack, Layout

MOST_AT_ONCE = 64
CHUNKS = (16, 48, 160, 512)  # values for the maximum number of prompt tokens of a step
KV_BYTES = 2 << 20  # KV pool: 64 blocks of the tiny model in float32, few enough for preemptions
WHOLE_S = 60.0
BETWEEN_KILLS_S = 1.0


@dataclass(frozen=True, slots=True)
class Course:
    """Way of computing all requests: in one engine, or in a stack of processes."""

    name: str
    dtype: str
    layout: Layout | None = None  # processes of the stack; None: one engine in this process
    speculates: bool = True
    kills: bool = False


@dataclass(slots=True)
class CourseAnswers:
    """Answers of a course, with counters of the events that could have changed them."""

    answers: Answers
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    continued: int = 0  # number of requests with more than one attempt
    kills: int = 0
    preemptions: int = 0  # number of preemptions by the workers that ran last

    def note(self, ended: Sequence[RecentRequest]) -> None:
        drafts = [each.drafts for each in ended if each.drafts is not None]
        self.drafted_tokens += sum(each.drafted_tokens for each in drafts)
        self.accepted_tokens += sum(each.accepted_tokens for each in drafts)
        self.continued += sum(each.attempts > 1 for each in ended)


def courses(dtype: str) -> list[Course]:
    return [
        Course("one engine, all at once", dtype),
        Course("1P+1D, no drafts", dtype, Layout(routers=1, prefill=1, decode=1), speculates=False),
        Course("1P+1D", dtype, Layout(routers=1, prefill=1, decode=1)),
        Course("2P+2D, kill -9", dtype, Layout(routers=1), kills=True),
    ]


def alone(model: Path, dtype: str, asked: Sequence[ExactRequest]) -> Answers:
    """Compute each request alone, one after another, without drafts."""
    llm = LLM(str(model), dtype=dtype)
    answers = [
        answered_here(*llm.generate([each.prompt], sampling_params(each.options), use_tqdm=False)) for each in asked
    ]
    llm.shutdown()
    return answers


def at_once(model: Path, course: Course, asked: Sequence[ExactRequest]) -> CourseAnswers:
    """Compute all requests concurrently in one engine, whose KV pool is so small that it preempts."""
    llm = LLM(
        str(model),
        dtype=course.dtype,
        max_num_seqs=MOST_AT_ONCE,
        max_num_batched_tokens=CHUNKS[1] + MOST_AT_ONCE,
        kv_memory=KV_BYTES,
        speculative_config={"method": "ngram", "num_speculative_tokens": 8},
    )
    params = [sampling_params(each.options) for each in asked]
    answers = [answered_here(each) for each in llm.generate([each.prompt for each in asked], params, use_tqdm=False)]
    done = llm.speculated
    llm.shutdown()
    return CourseAnswers(answers, done.drafted_tokens, done.accepted_tokens, preemptions=llm.preemptions)


async def in_stack(
    model: Path, course: Course, layout: Layout, asked: Sequence[ExactRequest], draw: random.Random
) -> CourseAnswers:
    """Compute all requests in real processes, in waves of random size."""
    flags = ["--dtype", course.dtype, "--kv-memory", KV_BYTES, "--chunk-tokens", draw.choice(CHUNKS)]
    flags += ["--speculate", "ngram"] if course.speculates else []
    made = CourseAnswers([])
    with tempfile.TemporaryDirectory() as folder:
        stack = ChaosStack(model, Path(folder), None, layout, [str(flag) for flag in flags])
        await stack.start()
        try:
            await stack.wait_whole(WHOLE_S)
            stack.mark_ready()
            [router] = stack.routers
            async with (
                AsyncBatonClient(router.direct) as client,
                AsyncAdminClient(f"{HOST}:{router.admin_port}") as admin,
                killing(stack, course, draw) as killed,
            ):
                while (begin := len(made.answers)) < len(asked):
                    wave = asked[begin : begin + draw.randint(1, MOST_AT_ONCE)]
                    completions = await asyncio.gather(*(client.complete(each.prompt, **each.options) for each in wave))
                    made.answers += map(answered_there, completions)
                    made.note(await admin.recent_requests(limit=len(wave)))
                workers = (await admin.status()).workers
            made.kills = len(killed)
            made.preemptions = sum(worker.load.preemptions for worker in workers if worker.load is not None)
        finally:
            await stack.stop()
    return made


@asynccontextmanager
async def killing(stack: ChaosStack, course: Course, draw: random.Random) -> AsyncIterator[list[str]]:
    """Inside the `with` block, kill one worker after another. All workers are ready again before the next is killed.

    Yields the list of all workers killed so far.
    """
    killed: list[str] = []

    async def kill() -> None:
        while course.kills:
            await asyncio.sleep(draw.uniform(0.2, BETWEEN_KILLS_S))
            name = draw.choice([place.name for place in stack.workers])
            if (life := stack.life(name)) is not None:
                stack.send(life, signal.SIGKILL)
                killed.append(name)
            await stack.wait_whole(WHOLE_S)

    task = asyncio.create_task(kill())
    try:
        yield killed
    finally:
        if task.done():
            task.result()  # raises if a worker did not come back
        task.cancel()
        await asyncio.wait([task])
