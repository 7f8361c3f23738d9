"""Time to the first token of an agent's next turn: with KV pools alone, with KV files, and with sessions.

    .venv/bin/python -m baton.lab.benchmarks.cluster.agents [--sessions 20,60,200] [--seconds 120] [--variant files ...]
                                               [--json FILE] [--picture docs/performance/agents.svg]

One prefill worker, one decode worker and a router run as real processes on a tiny model with contexts of up to 32 768
tokens; agent_work.py generates the conversations. The measurement begins once every agent's first turn is answered. A
turn unanswered at the end counts with its waiting time so far. "Of an ideal cache": prompt tokens served from a cache
over those that an unbounded cache would serve.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from baton.client import AsyncBatonClient, Delta, Finished, GenerateOptions
from baton.lab.benchmarks.cluster.agent_work import AgentTurn, AgentWork, IdealCache, Tokens, agent
from baton.lab.harness.processes import ONCE, HarnessWorker, RunningCluster, router_and_workers
from baton.lab.report.picture import Axis, BarChart, Bars, draw_bars
from baton.lab.report.result import SERVICE, Columns, make_result, read_arguments, table, write_pictures, write_result
from baton.lab.report.statistics import percentile
from baton.launch import CommandFailed
from baton.launch.tiny_checkpoint import VOCABULARY, write_tiny_checkpoint

BLOCK_TOKENS = 32
WARM_UP_S = 3600.0  # limit for the first turns: 200 of them take some 10 minutes on a slow core
ANSWER_S = 6 * 3600.0  # deadline and longest wait of a request; long, since routers first predict an hour of waiting
VARIANTS = ("pools alone", "files", "files, sessions")
KEPT_S = 684.0  # retention of a session: the longest pause of these agents


@dataclass(frozen=True, slots=True)
class AgentsSetup:
    work: AgentWork
    sessions: int
    kv_memory: str  # KV pool of each worker
    seconds: float


@dataclass(slots=True)
class AskedTurn:
    """Sent turn and its result."""

    sent_s: float
    prompt_tokens: int
    ideal_tokens: int  # prompt tokens that an unbounded cache had when the turn was sent
    first_s: float | None = None
    ended_s: float | None = None
    cached_tokens: int = 0
    answer_tokens: int = 0


@dataclass(slots=True)
class Log:
    """Records of one variant. `warm_s`: time at which all first turns were answered; infinity until then."""

    asked: list[AskedTurn] = field(default_factory=list)
    first_turns: int = 0
    warm_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class MeasuredAgents:
    variant: str
    sessions: int
    turns: int  # answered turns
    unanswered: int
    seconds: float
    prompt_tokens_p50: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    prompt_tokens_per_s: float
    answer_tokens_per_s: float
    cached_share: float | None  # fraction of prompt tokens that were cached; None if no turn was answered
    ideal_share: float | None
    working_set_blocks: int
    pool_blocks: int  # blocks in the smallest KV pool of a worker

    @property
    def of_ideal(self) -> float | None:
        return self.cached_share / self.ideal_share if self.cached_share is not None and self.ideal_share else None


class Agents:
    """Concurrent agents; an agent that has finished its task is replaced by a new one."""

    def __init__(self, setup: AgentsSetup, baton: AsyncBatonClient, ideal: IdealCache, names_sessions: bool) -> None:
        self._setup = setup
        self._names_sessions = names_sessions
        self._baton = baton
        self._ideal = ideal
        self.log = Log()
        self.warm = asyncio.Event()

    async def run(self, number: int) -> None:
        for task in range(sys.maxsize):
            turns = agent(self._setup.work, f"{number} {task}")
            turn = next(turns)
            while True:
                await asyncio.sleep(turn.pause_s)
                answer = await self._ask(turn)
                if task == 0 and turn.pause_s == 0.0:
                    self._count_first_turn()
                try:
                    turn = turns.send(answer)
                except StopIteration:
                    break

    def _count_first_turn(self) -> None:
        self.log.first_turns += 1
        if self.log.first_turns == self._setup.sessions:
            self.log.warm_s = time.monotonic()
            self.warm.set()

    async def _ask(self, turn: AgentTurn) -> Tokens:
        asked = AskedTurn(time.monotonic(), len(turn.prompt), self._ideal.cached_tokens(turn.prompt))
        self.log.asked.append(asked)
        answer: list[int] = []
        options = GenerateOptions(max_tokens=turn.answer_tokens, temperature=0.0, ignore_eos=True)
        if self._names_sessions:
            options |= GenerateOptions(session_id=turn.session, keep_for_s=KEPT_S, done=turn.is_last)
        events = self._baton.generate(turn.prompt, **options)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Delta) and event.token_ids:
                    asked.first_s = asked.first_s or time.monotonic()
                    answer += event.token_ids
                elif isinstance(event, Finished) and event.usage is not None:
                    asked.cached_tokens = event.usage.cached_tokens
        asked.ended_s = time.monotonic()
        asked.answer_tokens = len(answer)
        self._ideal.add((*turn.prompt, *answer))
        return tuple(answer)


async def measure(setup: AgentsSetup, variant: str, folder: Path) -> MeasuredAgents:
    with TemporaryDirectory(dir=folder) as tier:
        of_tier = () if variant == "pools alone" else ("--kv-tier-dir", tier, "--kv-tier-size", "16GiB")
        flags = ("--model", folder / "tiny", "--kv-memory", setup.kv_memory, "--log-level", "warning", *of_tier)
        workers = (
            HarnessWorker("prefill-0", "baton.prefill_worker", flags),
            HarnessWorker("decode-0", "baton.decode_worker", flags),
        )
        router_flags = ("--log-level", "warning", "--max-wait-s", ANSWER_S, "--default-deadline-s", ANSWER_S)
        async with router_and_workers(folder, workers, router_flags) as cluster:
            pool_blocks = await pool_blocks_of(cluster)
            async with AsyncBatonClient(cluster.target, timeout_s=ANSWER_S, retry=ONCE) as baton:
                ideal = IdealCache(BLOCK_TOKENS)
                agents = Agents(setup, baton, ideal, names_sessions=variant == "files, sessions")
                async with working(agents, setup.sessions):
                    async with asyncio.timeout(WARM_UP_S):
                        await agents.warm.wait()
                    await asyncio.sleep(setup.seconds)
                    end_s = time.monotonic()
    return summarise(variant, setup, agents.log, end_s, ideal.blocks, pool_blocks)


@asynccontextmanager
async def working(agents: Agents, count: int) -> AsyncIterator[None]:
    """Run the agents inside the `with` block. Raises: ExceptionGroup with the first error of an agent."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(agents.run(number)) for number in range(count)]
        yield
        for task in tasks:
            task.cancel()


async def pool_blocks_of(cluster: RunningCluster) -> int:
    """Return the number of blocks in the smallest KV pool of a worker. Raises: CommandFailed."""
    status = await cluster.status()
    if status is None:
        raise CommandFailed("the router does not answer")
    return min(worker.total_blocks for worker in status.workers)


def summarise(
    variant: str, setup: AgentsSetup, log: Log, end_s: float, working_set_blocks: int, pool_blocks: int
) -> MeasuredAgents:
    """Summarise a variant. Raises: CommandFailed if no turn was sent."""
    sent = [each for each in log.asked if log.warm_s <= each.sent_s <= end_s]
    answered = [each for each in sent if each.ended_s is not None and each.ended_s <= end_s]
    if not sent:
        raise CommandFailed(f"{variant}, {setup.sessions} sessions: no turn was sent in {setup.seconds:g} s")
    ttfts_ms = [((each.first_s or end_s) - each.sent_s) * 1e3 for each in sent]
    seconds = end_s - log.warm_s
    prompt_tokens = sum(each.prompt_tokens for each in answered)
    return MeasuredAgents(
        variant=variant,
        sessions=setup.sessions,
        turns=len(answered),
        unanswered=len(sent) - len(answered),
        seconds=seconds,
        prompt_tokens_p50=percentile([each.prompt_tokens for each in sent], 50),
        ttft_p50_ms=percentile(ttfts_ms, 50),
        ttft_p99_ms=percentile(ttfts_ms, 99),
        prompt_tokens_per_s=prompt_tokens / seconds,
        answer_tokens_per_s=sum(each.answer_tokens for each in answered) / seconds,
        cached_share=sum(each.cached_tokens for each in answered) / prompt_tokens if answered else None,
        ideal_share=sum(each.ideal_tokens for each in answered) / prompt_tokens if answered else None,
        working_set_blocks=working_set_blocks,
        pool_blocks=pool_blocks,
    )


COLUMNS: Columns[MeasuredAgents] = {
    "variant": lambda each: each.variant,
    "sessions": lambda each: each.sessions,
    "turns": lambda each: each.turns,
    "unanswered": lambda each: each.unanswered,
    "prompt p50": lambda each: f"{each.prompt_tokens_p50:,.0f}",
    "TTFT p50 ms": lambda each: f"{each.ttft_p50_ms:,.0f}",
    "p99 ms": lambda each: f"{each.ttft_p99_ms:,.0f}",
    "prompt tokens/s": lambda each: f"{each.prompt_tokens_per_s:,.0f}",
    "answer tokens/s": lambda each: f"{each.answer_tokens_per_s:.1f}",
    "cached": lambda each: "" if each.cached_share is None else f"{each.cached_share:.1%}",
    "of an ideal cache": lambda each: "" if each.of_ideal is None else f"{each.of_ideal:.3f}",
    "pool by working set": lambda each: f"{each.pool_blocks / each.working_set_blocks:.2f}",
}


def measure_all(
    sessions: Sequence[int], variants: Sequence[str], work: AgentWork, kv_memory: str, seconds: float
) -> Iterator[MeasuredAgents]:
    with TemporaryDirectory(prefix="baton-bench-") as name:
        write_tiny_checkpoint(Path(name) / "tiny", context_tokens=work.context_tokens)
        for count in sessions:
            for variant in variants:
                yield asyncio.run(measure(AgentsSetup(work, count, kv_memory, seconds), variant, Path(name)))


def as_picture(rows: Sequence[MeasuredAgents]) -> str:
    counts = sorted({each.sessions for each in rows})
    by_case = {(each.variant, each.sessions): each.ttft_p50_ms for each in rows}
    series = tuple(Bars(variant, tuple(by_case.get((variant, count)) for count in counts)) for variant in VARIANTS)
    groups = tuple(f"{count} agents" for count in counts)
    axis = Axis("milliseconds to the first token, median", is_log=True)
    return draw_bars(BarChart("The next turn of an agent", axis, groups, series))


def main() -> None:
    options = read_arguments(
        __doc__,
        sessions=("20,60,200", "numbers of concurrent agents"),
        variant=([], f"any of {', '.join(map(repr, VARIANTS))}; default: all"),
        context=(32_768, "context length in tokens"),
        kv_memory=("256MiB", "KV pool of each worker"),
        seconds=(120.0, "seconds of each measurement"),
        seed=0,
        picture=(None, "file for a chart (SVG)"),
    )
    work = AgentWork(options.context, VOCABULARY, options.seed)
    rows = []
    counts, variants = [int(count) for count in options.sessions.split(",")], options.variant or VARIANTS
    if unknown := set(variants) - set(VARIANTS):
        raise CommandFailed(f"no variant {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    for row in measure_all(counts, variants, work, options.kv_memory, options.seconds):
        rows.append(row)
        print(table([row], COLUMNS), file=sys.stderr, flush=True)
    print(table(rows, COLUMNS))
    measured = {f"{row.sessions} agents, {row.variant}": {**asdict(row), "of_ideal": row.of_ideal} for row in rows}
    more = {"work": asdict(work), "kv_memory": options.kv_memory}
    write_result(options.json, make_result((*SERVICE, "kvtransfer"), [measured], None, **more))
    if options.picture is not None:
        write_pictures(options.picture.parent, {options.picture.stem: as_picture(rows)})


if __name__ == "__main__":
    main()
