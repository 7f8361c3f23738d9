"""Streams that their clients give up, in any phase and in bursts: how long the workers hold pages for nobody.

One stream, or one burst, at a time, so that whatever is held after the cancel is held for it. Workers report every
20 ms here, and the router is asked every 5 ms: figures are too long by that much at most.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from chaos.cases import Case, make_cases
from chaos.checker import ExpectedChoice, check
from chaos.history import Behaviour, History
from chaos.load import TIMEOUT_S, read_stream
from chaos.stack import Stack
from cli.bench.statistics import percentile
from cli.tiny_checkpoint import write_tiny_checkpoint
from client import AsyncBatonClient

START_S = 120.0
REPORT_PERIOD_S = 0.02
LOOK_S = 0.005
WATCHED_S, BURST_WATCHED_S = 0.3, 1.5  # after a cancel; what is held at the end is counted as held for so long
LONGEST_S = 0.5  # of a stream before it is given up
BOUND_S = 0.1  # and a step of the engine
AFTER = 20  # cancels between two requests that must be exact


@dataclass
class Cancels:
    """Seconds from the client's cancel until no worker held a page; one for each stream alone, one for each burst."""

    single_s: list[float] = field(default_factory=list)
    burst_s: list[float] = field(default_factory=list)
    burst: int = 0  # streams in each
    before_first_token: int = 0
    exact: int = 0
    inexact: int = 0

    @property
    def count(self) -> int:
        return len(self.single_s) + self.burst * len(self.burst_s)

    @property
    def is_good(self) -> bool:
        longest = max((*self.single_s, *self.burst_s), default=WATCHED_S)
        return not self.inexact and longest <= BOUND_S + REPORT_PERIOD_S + 2 * LOOK_S


async def run_cancels(singles: int, bursts: int, burst: int, seed: int, say: Callable[[str], None]) -> Cancels:
    """Raises: NotWhole where the stack does not come up."""
    with tempfile.TemporaryDirectory(prefix="baton-cancels-") as name:
        folder = Path(name)
        write_tiny_checkpoint(folder / "tiny")
        stack = Stack(folder / "tiny", folder, None, worker_flags=("--report-period-s", str(REPORT_PERIOD_S)))
        try:
            await stack.start()
            await stack.wait_whole(START_S)
            stack.mark_ready()
            say("stack whole")
            return await _cancel(stack, singles, bursts, burst, random.Random(f"cancels {seed}"), say)
        finally:
            await stack.stop()


async def _cancel(
    stack: Stack, singles: int, bursts: int, burst: int, draw: random.Random, say: Callable[[str], None]
) -> Cancels:
    found = Cancels(burst=burst)
    [case] = [case for case in make_cases(0, 40, 1) if case.name == "greedy 0"]
    async with AsyncBatonClient(stack.routers[0].told, timeout_s=TIMEOUT_S) as baton:
        answer = await baton.complete(case.prompt, **case.options)
        choice = answer.choices[0]
        expected = [ExpectedChoice(choice.token_ids, choice.text, choice.finish_reason.value, choice.matched_stop)]
        for number in range(singles + bursts):
            together = 1 if number < singles else burst
            seconds = await _give_up(stack, baton, [_prompt(draw) for _ in range(together)], draw, found)
            (found.single_s if together == 1 else found.burst_s).append(seconds)
            if number % AFTER == 0 or together > 1:
                await _ask_again(baton, case, expected, found)
            if (number + 1) % 100 == 0:
                say(f"{number + 1} of {singles + bursts}: p99 {percentile(found.single_s, 99) * 1e3:.0f} ms")
    return found


async def _give_up(
    stack: Stack, baton: AsyncBatonClient, prompts: Sequence[list[int]], draw: random.Random, found: Cancels
) -> float:
    """Begins streams, gives all of them up at once, and says until when pages were held."""
    tokens = [0] * len(prompts)

    async def stream(place: int) -> None:
        async with aclosing(baton.generate(prompts[place], max_tokens=1000, ignore_eos=True)) as events:
            async for _ in events:
                tokens[place] += 1

    tasks = [asyncio.create_task(stream(place)) for place in range(len(prompts))]
    await asyncio.sleep(draw.uniform(0.0, LONGEST_S))
    cancelled_s = time.monotonic()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    found.before_first_token += tokens.count(0)
    held_s, watched_s = 0.0, WATCHED_S if len(prompts) == 1 else BURST_WATCHED_S
    while (passed_s := time.monotonic() - cancelled_s) < watched_s:
        if await _holds(stack):
            held_s = time.monotonic() - cancelled_s
        await asyncio.sleep(max(0.0, LOOK_S - (time.monotonic() - cancelled_s - passed_s)))
    return held_s


async def _holds(stack: Stack) -> bool:
    [status, *_] = await stack.statuses()
    return status is None or any(worker.load is None or worker.load.pages.held for worker in status.workers)


async def _ask_again(baton: AsyncBatonClient, case: Case, expected: Sequence[ExpectedChoice], found: Cancels) -> None:
    history = History(0, case.name, Behaviour.READS, "", time.monotonic())
    await read_stream(baton, case, history)
    if check(history, expected, TIMEOUT_S):
        found.inexact += 1
    else:
        found.exact += 1


def _prompt(draw: random.Random) -> list[int]:
    return [draw.randrange(3, 259) for _ in range(draw.choice((5, 60, 300, 900)))]
