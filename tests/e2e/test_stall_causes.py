"""A fault of each kind stalls an answer: the trace names it as the main cause, and blames the right request."""

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncBatonClient, Delta
from tests.e2e.conftest import run
from tests.e2e.stack import Stack, make_stack
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.relay import Relay

pytestmark = pytest.mark.alone
BLAMED_SHARE = 0.8  # of a stall that must be put down to the right cause
TRACE_WRITTEN_S = 30.0
HELD_UP_S = 0.4
BEGUN_TOKENS = 200
ANSWER_TOKENS = 1500
BUSY_PROCESSES, BUSY_S = 24, 1.5
LONG_PROMPT = 2000
POSITIONS = 4096
FULL_POOL = "3MiB"


@pytest.fixture(scope="module")
def stalling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Decode worker that computes prompts itself, on one core."""
    folder = tmp_path_factory.mktemp("stalling")
    model = make_checkpoint(folder / "tiny", "llama", seed=11, max_position_embeddings=POSITIONS)
    core = str(min(os.sched_getaffinity(0)))
    # With so high a TBT, steps take whole urgent prompts even if a stop or a busy core has made prompts look expensive.
    objectives = ["--ttft-slo-ms", "2000", "--tbt-slo-ms", "100000"]
    flags = ["--cores", core, "--chunk-tokens", "2048", "--kv-memory", FULL_POOL]
    flags += ["--swap-memory", "0"]
    router = ["--local-prefill-tokens", "100000", "--cores", str(max(os.sched_getaffinity(0)))]
    router += [*objectives, "--stall-min-ms", "8"]  # a fast core computes LONG_PROMPT in less than the default of 20 ms
    stack = make_stack(folder, model, prefill=0, with_redis=False, worker_flags=flags, router_flags=router)
    command = stack.processes["decode-0"].command
    command[command.index("baton.decode_worker")] = "tests.fixtures.stalling_worker"
    yield from run(stack)


@pytest.fixture
async def baton(stalling: Stack) -> AsyncIterator[AsyncBatonClient]:
    async with AsyncBatonClient(stalling.target, timeout_s=60) as client:
        yield client


class Answer:
    """Running answer; `begun` is set when a good part of it has arrived."""

    def __init__(self, client: AsyncBatonClient, tokens: int = ANSWER_TOKENS, **options: Any) -> None:
        self.name = f"stall-{uuid.uuid4().hex}"
        self.begun = asyncio.Event()
        self._options = {"max_tokens": tokens, "ignore_eos": "regex" not in options, "cache_salt": self.name, **options}
        self._task = asyncio.create_task(self._read(client))

    async def _read(self, client: AsyncBatonClient) -> None:
        tokens = 0
        try:
            async for event in client.generate([5, 6, 7], request_id=self.name, **self._options):
                tokens += len(event.token_ids) if isinstance(event, Delta) else 0
                if tokens >= BEGUN_TOKENS:
                    self.begun.set()
        finally:
            self.begun.set()  # even on an error, so that the test goes on to `whole`, which raises it

    async def whole(self) -> None:
        await self._task


async def stalls_of(stack: Stack, name: str) -> list[dict[str, Any]]:
    """Return the attributes of its stalls, the longest first."""

    def spans() -> list[dict[str, Any]]:
        written = stack.spans()
        root = next((each for each in written if each["attributes"].get("gen_ai.response.id") == name), None)
        return [each for each in written if root is not None and each["parent_span_id"] == root["span_id"]]

    await asyncio.to_thread(
        stack.wait_for, lambda: any(each["name"] == "decode" for each in spans()), TRACE_WRITTEN_S, "trace"
    )
    decode = next(span for span in spans() if span["name"] == "decode")
    stalls = [event["attributes"] for event in decode["events"] if event["name"] == "stall"]
    return sorted(stalls, key=lambda stall: -stall["baton.gap_ms"])


def blames(stall: dict[str, Any], cause: str) -> bool:
    """Return whether a cause explains most of a stall, and all causes add up to it.

    Time that the machine spent on other processes is a cause of its own, which a test cannot control, and is left out.
    """
    cause_ms = dict(zip(stall["baton.causes"], stall["baton.cause_ms"], strict=True))
    total_ms = stall["baton.usual_ms"] + sum(cause_ms.values())
    adds_up = abs(total_ms - stall["baton.gap_ms"]) <= 0.05 * stall["baton.gap_ms"]
    waited_ms = cause_ms.pop("cpu_wait", 0.0) if cause != "cpu_wait" else 0.0
    first = next(iter(cause_ms), "") == cause
    return adds_up and first and cause_ms[cause] >= BLAMED_SHARE * (stall["baton.gap_ms"] - waited_ms)


def assert_blamed(stalls: list[dict[str, Any]], cause: str) -> dict[str, Any]:
    """Check the longest stall with that cause; a longer one may have another cause, such as a busy machine."""
    blamed = [stall for stall in stalls if blames(stall, cause)]
    assert blamed, stalls
    return blamed[0]


def culprit(stall: dict[str, Any], cause: str) -> str:
    """Return the request that is blamed."""
    return str(dict(zip(stall["baton.causes"], stall["baton.culprits"], strict=True))[cause])


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_long_prompt_next_to_an_answer_is_blamed(stalling: Stack, baton: AsyncBatonClient) -> None:
    """The first prompts are computed in small chunks, until the worker has measured how long a prompt takes."""
    for attempt in range(12):
        answer = Answer(baton)
        await answer.begun.wait()
        prompt = [(attempt * 31 + index) % 400 + 3 for index in range(LONG_PROMPT)]
        neighbour = f"neighbour-{uuid.uuid4().hex}"
        await baton.complete(prompt, max_tokens=1, cache_salt=neighbour, request_id=neighbour)
        await answer.whole()
        stalls = await stalls_of(stalling, answer.name)
        if stalls and blames(stalls[0], "prompt_tokens"):
            assert culprit(stalls[0], "prompt_tokens") == neighbour
            return
    raise AssertionError(stalls)


@pytest.mark.parametrize(("process", "cause"), [("decode-0", "stopped"), ("router", "router_event_loop")])
async def test_stall_of_a_stopped_process_is_blamed(
    stalling: Stack, baton: AsyncBatonClient, process: str, cause: str
) -> None:
    answer = Answer(baton)
    await answer.begun.wait()
    with stopped(stalling.processes[process].pid):
        await asyncio.sleep(HELD_UP_S)
    await answer.whole()
    assert_blamed(await stalls_of(stalling, answer.name), cause)


@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGUSR1, "garbage_collection"), (signal.SIGUSR2, "interpreter_lock")]
)
async def test_python_of_the_worker_is_named(
    stalling: Stack, baton: AsyncBatonClient, number: signal.Signals, cause: str
) -> None:
    answer = Answer(baton)
    await answer.begun.wait()
    stalling.processes["decode-0"].signal(number)
    await answer.whole()
    assert_blamed(await stalls_of(stalling, answer.name), cause)


async def test_busy_processes_on_the_core_are_waiting_for_it(stalling: Stack, baton: AsyncBatonClient) -> None:
    core = min(os.sched_getaffinity(0))
    answer = Answer(baton)
    await answer.begun.wait()
    loop = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(BUSY_PROCESSES)]
    try:
        await asyncio.sleep(BUSY_S)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    await answer.whole()
    stalls = await stalls_of(stalling, answer.name)
    # One stall is not enough: the event loop, on the same core, may have waited longer than the engine thread.
    blamed = [stall for stall in stalls if blames(stall, "cpu_wait")]
    assert 2 * len(blamed) > len(stalls), stalls


async def test_answer_that_gave_up_its_blocks_blames_the_other(stalling: Stack, baton: AsyncBatonClient) -> None:
    older = Answer(baton, tokens=2400)
    await older.begun.wait()
    newer = Answer(baton, tokens=1800)
    await asyncio.gather(older.whole(), newer.whole())
    stall = assert_blamed(await stalls_of(stalling, newer.name), "preemption")
    assert culprit(stall, "preemption") == older.name


async def test_slow_grammar_is_blamed_on_its_own_request(stalling: Stack, baton: AsyncBatonClient) -> None:
    answer = Answer(baton, tokens=BEGUN_TOKENS, regex="[a-z]{300}")
    await answer.whole()
    stall = assert_blamed(await stalls_of(stalling, answer.name), "late_mask")
    assert culprit(stall, "late_mask") == answer.name


async def test_slow_link_is_the_network(stalling: Stack, tmp_path: Path) -> None:
    worker = stalling.processes["decode-0"].command
    relay = Relay(int(worker[worker.index("--port") + 1]))
    await relay.start()
    beside = make_stack(tmp_path, Path(worker[worker.index("--model") + 1]), prefill=0, with_redis=False)
    command = beside.processes.pop("decode-0") and beside.processes["router"].command
    command[command.index("--workers") + 1] = f"decode@127.0.0.1:{relay.port}"
    try:
        beside.processes["router"].start()
        await asyncio.to_thread(beside.wait_ready, 1)
        async with AsyncBatonClient(beside.target, timeout_s=60) as client:
            answer = Answer(client)
            await answer.begun.wait()
            relay.freeze()
            await asyncio.sleep(HELD_UP_S)
            relay.thaw()
            await answer.whole()
        assert_blamed(await stalls_of(beside, answer.name), "network")
    finally:
        await asyncio.to_thread(beside.stop)
        await relay.stop()
