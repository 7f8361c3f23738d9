"""Streams that their clients give up, in any phase and in bursts: how long the workers hold pages for nobody.

One stream, or one burst, at a time, so that whatever is held after the cancel is held for it. Workers report every
20 ms here, to this process too: figures are too long by that much at most. Prompts are new every time.
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
from chaos.pages import PageWatch
from chaos.stack import Layout, Stack
from cli.bench.statistics import percentile
from cli.tiny_checkpoint import write_tiny_checkpoint
from client import AsyncBatonClient

START_S = 120.0
REPORT_PERIOD_S = 0.02
SETTLED_S = 0.2  # without a page, nothing was on its way any more
WATCHED_S = 5.0  # after a cancel; what is held at the end is counted as held for so long
LONGEST_S = 0.5  # of a stream before it is given up
MOST_BEGUN = 0.6  # of a burst, as a share of its streams, when it is given up
BEGIN_S = 5.0  # until so many have, at most
POLL_S = 0.005
BOUND_S = 0.1  # and a step of the engine
AFTER = 20  # cancels between two requests that must be exact


@dataclass
class Cancels:
    """Seconds from the client's cancel until a side held no page; one for each stream alone, one for each burst."""

    burst: int = 0  # streams in each
    single_s: dict[str, list[float]] = field(default_factory=lambda: {"prefill": [], "decode": []})
    burst_s: dict[str, list[float]] = field(default_factory=lambda: {"prefill": [], "decode": []})
    before_first_token: int = 0
    exact: int = 0
    inexact: int = 0
    longest_step_s: dict[str, float] = field(default_factory=dict)  # of a role, while streams were given up
    nothing_held: int = 0  # singles and bursts after which no worker held a page: they show nothing

    @property
    def count(self) -> int:
        return len(self.single_s["decode"]) + self.burst * len(self.burst_s["decode"])

    def bound_s(self, role: str) -> float:
        return BOUND_S + self.longest_step_s[role] + REPORT_PERIOD_S

    @property
    def is_good(self) -> bool:
        in_time = (
            max(*self.single_s[role], *self.burst_s[role], 0.0) <= self.bound_s(role) for role in self.longest_step_s
        )
        return not self.inexact and self.count > 0 and all(in_time)


async def run_cancels(
    singles: int, bursts: int, burst: int, seed: int, layout: Layout, say: Callable[[str], None]
) -> Cancels:
    """Raises: NotWhole where the stack does not come up."""
    with tempfile.TemporaryDirectory(prefix="baton-cancels-") as name:
        folder = Path(name)
        write_tiny_checkpoint(folder / "tiny")
        flags = ("--report-period-s", str(REPORT_PERIOD_S))
        stack = Stack(folder / "tiny", folder, None, layout, flags, records_steps=True)
        watch = PageWatch(stack.workers)
        try:
            await stack.start()
            await stack.wait_whole(START_S)
            stack.mark_ready()
            watch.start()
            say("stack whole")
            began_s = time.monotonic()
            found = await _cancel(stack, watch, singles, bursts, burst, random.Random(f"cancels {seed}"), say)
            for role in found.single_s:
                steps_s = (s for since, s in stack.steps(role) if since >= began_s)
                found.longest_step_s[role] = max(steps_s, default=0.0)
            return found
        finally:
            await watch.stop()
            await stack.stop()


async def _cancel(
    stack: Stack,
    watch: PageWatch,
    singles: int,
    bursts: int,
    burst: int,
    draw: random.Random,
    say: Callable[[str], None],
) -> Cancels:
    found = Cancels(burst)
    [case] = [case for case in make_cases(0, 40, 1) if case.name == "greedy 0"]
    async with AsyncBatonClient(stack.routers[0].direct, timeout_s=TIMEOUT_S) as baton:
        answer = await baton.complete(case.prompt, **case.options)
        choice = answer.choices[0]
        expected = [ExpectedChoice(choice.token_ids, choice.text, choice.finish_reason.value, choice.matched_stop)]
        for number in range(singles + bursts):
            together = 1 if number < singles else burst
            held_s = await _give_up(watch, baton, [_prompt(draw) for _ in range(together)], draw, found)
            for role, seconds in (found.single_s if number < singles else found.burst_s).items():
                seconds.append(held_s[role])
            if number % AFTER == 0 or together > 1:
                await _ask_again(baton, case, expected, found)
            if (number + 1) % 100 == 0:
                p99_ms = 1e3 * percentile(found.single_s["decode"], 99)
                say(f"{number + 1} of {singles + bursts}: p99 on decode workers {p99_ms:.0f} ms")
    return found


async def _give_up(
    watch: PageWatch, baton: AsyncBatonClient, prompts: Sequence[list[int]], draw: random.Random, found: Cancels
) -> dict[str, float]:
    """Begins streams, gives all of them up at once, and says how long each role still held pages."""
    tokens = [0] * len(prompts)

    async def stream(place: int) -> None:
        async with aclosing(baton.generate(prompts[place], max_tokens=1000, ignore_eos=True)) as events:
            async for _ in events:
                tokens[place] += 1

    tasks = [asyncio.create_task(stream(place)) for place in range(len(prompts))]
    if len(prompts) == 1:
        await asyncio.sleep(draw.uniform(0.0, LONGEST_S))
    else:
        await _begun(tokens, draw.uniform(0.0, MOST_BEGUN))
    cancelled_s = time.monotonic()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    found.before_first_token += tokens.count(0)
    held_s = {"prefill": 0.0, "decode": 0.0}
    for name, free_s in (await watch.free_since(SETTLED_S, WATCHED_S)).items():
        role, seconds = name.partition("-")[0], WATCHED_S if free_s is None else free_s - cancelled_s
        held_s[role] = max(held_s[role], seconds)
    found.nothing_held += not any(held_s.values())
    return held_s


async def _begun(tokens: Sequence[int], share: float) -> None:
    """Until that share of a burst has had a token: the others wait, are computed, or are on their way."""
    until_s = time.monotonic() + BEGIN_S
    while sum(map(bool, tokens)) <= share * len(tokens) and time.monotonic() < until_s:  # noqa: ASYNC110 -- counts tell nobody
        await asyncio.sleep(POLL_S)


async def _ask_again(baton: AsyncBatonClient, case: Case, expected: Sequence[ExpectedChoice], found: Cancels) -> None:
    history = History(0, case.name, Behaviour.READS, "", time.monotonic())
    await read_stream(baton, case, history)
    if check(history, expected, TIMEOUT_S):
        found.inexact += 1
    else:
        found.exact += 1


def _prompt(draw: random.Random) -> list[int]:
    return [draw.randrange(3, 259) for _ in range(draw.choice((5, 60, 300, 900)))]
