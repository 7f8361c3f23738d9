"""Discrete-event simulation of a trace on workers; the policy that chooses workers is passed in.

A prefill worker computes one prompt after another at a constant rate. When a prompt starts, its leading blocks that are
cached then are its hits; when it ends, its blocks enter the cache. With a disk tier, the blocks after the hits are
loaded before the prompt is queued, if loading is faster than computing; one prompt loads at a time, while others are
computed. A decode worker generates all its answers at once; the time between tokens of an answer depends on the
worker's load when the answer began.
"""

import heapq
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from typing import NamedTuple, Protocol

from baton.lab.benchmarks.placement.files import Directory, FileOptions, SimulatedFiles, load_costs
from baton.lab.benchmarks.placement.traces import BLOCK_TOKENS, TraceArrival
from baton.text.block_groups import CHARGED_ANSWER_TOKENS
from baton.text.kv_loading import LoadCosts


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of workers. Defaults: a model of 8 billion parameters on one H200, as published for common engines."""

    prefill_tokens_per_s: float = 20_000.0
    token_gap_ms: float = 8.0
    token_gap_ms_per_token: float = 3e-5  # added by each token in flight, whose KV is read at about 4 TB/s
    kv_bytes_per_token: float = 131_072.0
    link_gb_per_s: float = 40.0


class Changes(NamedTuple):
    stored: Sequence[bytes]
    evicted: Sequence[bytes]


class BlockCache:
    """LRU cache of blocks; the end of a prompt counts as older than its beginning, so leaves are evicted first."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def hit_blocks(self, blocks: Sequence[bytes]) -> int:
        known = self._blocks
        return next((place for place, block in enumerate(blocks) if block not in known), len(blocks))

    def insert(self, blocks: Sequence[bytes]) -> Changes:
        known = self._blocks
        stored = [block for block in blocks if block not in known]
        for block in reversed(blocks):
            known[block] = None
            known.move_to_end(block)
        evicted = [known.popitem(last=False)[0] for _ in range(len(known) - self._capacity_blocks)]
        return Changes(stored, evicted)


@dataclass(slots=True)
class SimulatedPrompt:
    """Simulated request and its times, in seconds since the trace began."""

    number: int
    arrival: TraceArrival
    prefill: int = 0
    decode: int = 0
    expected_hit_blocks: int = 0  # hits that the policy expected at dispatch
    expected_loaded_blocks: int = 0  # blocks after these hits that the policy expected to be loaded from files
    hit_blocks: int = 0
    loaded_blocks: int = 0
    load_s: float = 0.0
    computed_tokens: int = 0
    started_s: float = 0.0
    first_token_s: float = 0.0

    @property
    def expected_tokens(self) -> int:
        expected_blocks = self.expected_hit_blocks + self.expected_loaded_blocks
        return max(1, self.arrival.input_tokens - BLOCK_TOKENS * expected_blocks)


@dataclass(slots=True)
class PrefillWorker:
    cache: BlockCache
    tokens_per_s: float
    files: SimulatedFiles | None = None
    costs: LoadCosts | None = None  # None without files
    waiting: deque[SimulatedPrompt] = field(default_factory=deque)
    running: SimulatedPrompt | None = None
    to_load: deque[SimulatedPrompt] = field(default_factory=deque)
    loading: SimulatedPrompt | None = None
    tokens_in_flight: int = 0
    requests_in_flight: int = 0

    def take(self, prompt: SimulatedPrompt) -> None:
        """Queue a prompt. The tokens that the policy expected this worker to compute count as in flight."""
        (self.to_load if self._loads(prompt)[0] else self.waiting).append(prompt)
        self.tokens_in_flight += prompt.expected_tokens
        self.requests_in_flight += 1

    def start_loading(self) -> SimulatedPrompt | None:
        """Start to load blocks of the next prompt and return it; None if a load is running or no prompt waits."""
        while self.loading is None and self.to_load:
            prompt = self.to_load.popleft()
            prompt.loaded_blocks, prompt.load_s = self._loads(prompt)
            if prompt.loaded_blocks:
                self.loading = prompt
                return prompt
            self.waiting.append(prompt)  # nothing left to load: an earlier prompt has brought its blocks
        return None

    def end_loading(self) -> Changes:
        prompt, self.loading = self.loading, None
        if prompt is None:
            raise RuntimeError("a load from files ended, but no prompt was loading")
        self.waiting.append(prompt)
        blocks = prompt.arrival.blocks
        return self.cache.insert(blocks[: self.cache.hit_blocks(blocks) + prompt.loaded_blocks])

    def start(self, now: float) -> SimulatedPrompt | None:
        """Start the next prompt and return it with its `first_token_s`; None if one is running or none waits."""
        if self.running is not None or not self.waiting:
            return None
        prompt = self.running = self.waiting.popleft()
        prompt.started_s = now
        cached_blocks = self.cache.hit_blocks(prompt.arrival.blocks)
        prompt.loaded_blocks = min(prompt.loaded_blocks, cached_blocks)
        prompt.hit_blocks = cached_blocks - prompt.loaded_blocks
        # The last token is always computed, since its logits are needed.
        prompt.computed_tokens = max(1, prompt.arrival.input_tokens - BLOCK_TOKENS * cached_blocks)
        prompt.first_token_s = now + prompt.computed_tokens / self.tokens_per_s
        return prompt

    def in_files(self, blocks: Sequence[bytes], hit_blocks: int) -> int:
        """Return the number of consecutive blocks in files after the hits."""
        return 0 if self.files is None else self.files.directory.behind(blocks, hit_blocks)

    def _loads(self, prompt: SimulatedPrompt) -> tuple[int, float]:
        """Return how many blocks to load from files, by the rule of real workers, and the time in seconds."""
        blocks = prompt.arrival.blocks
        found = self.in_files(blocks, self.cache.hit_blocks(blocks))
        if not found or self.costs is None or not self.costs.favour_loading(found):
            return 0, 0.0
        return found, self.costs.load_s(found) or 0.0

    def finish(self) -> Changes:
        """Finish the running prompt and return the changes of the cache."""
        prompt, self.running = self.running, None
        if prompt is None:
            raise RuntimeError("a prompt ended, but none was running")
        self.tokens_in_flight -= prompt.expected_tokens
        self.requests_in_flight -= 1
        if self.files is not None:
            self.files.write(prompt.arrival.blocks)
        return self.cache.insert(prompt.arrival.blocks)


@dataclass(slots=True)
class DecodeWorker:
    tokens_in_flight: int = 0


@dataclass(slots=True)
class SimulatedWorkers:
    """Simulated prefill and decode workers, each identified by its number."""

    prefill: list[PrefillWorker]
    decode: list[DecodeWorker]
    speeds: Speeds
    file_options: FileOptions | None = None

    @classmethod
    def of(
        cls, workers: int, blocks_per_worker: int, speeds: Speeds, files: FileOptions | None = None
    ) -> "SimulatedWorkers":
        """Create simulated workers: as many for decode as for prefill."""
        prefill = [PrefillWorker(BlockCache(blocks_per_worker), speeds.prefill_tokens_per_s) for _ in range(workers)]
        if files is not None:
            costs = load_costs(speeds.prefill_tokens_per_s, speeds.kv_bytes_per_token, files.load_gb_per_s)
            directories = [Directory() for _ in range(-(-workers // files.workers_per_directory))]
            for number, worker in enumerate(prefill):
                directory = directories[number // files.workers_per_directory]
                worker.files, worker.costs = SimulatedFiles(directory, files.blocks_per_worker), costs
        return cls(prefill, [DecodeWorker() for _ in range(workers)], speeds, files)

    def hit_blocks(self, blocks: Sequence[bytes]) -> list[int]:
        """Return, for each prefill worker, how many of these blocks it has cached."""
        return [worker.cache.hit_blocks(blocks) for worker in self.prefill]


def pooled_hit_rate(arrivals: Sequence[TraceArrival], capacity_blocks: int | None) -> float:
    """Return the fraction of blocks that one LRU cache would hit if no two prompts overlapped in time.

    `capacity_blocks`: None for an unbounded cache. This is about the best that placement on several caches of the same
    total size can reach, but no strict bound: separating reused blocks from others may do better.
    """
    cache = BlockCache(sum(len(arrival.blocks) for arrival in arrivals) if capacity_blocks is None else capacity_blocks)
    hits = total = 0
    for arrival in arrivals:
        hits += cache.hit_blocks(arrival.blocks)
        total += len(arrival.blocks)
        cache.insert(arrival.blocks)
    return hits / total if total else 0.0


class WorkerChoice(NamedTuple):
    prefill: int
    decode: int
    expected_hit_blocks: int
    expected_loaded_blocks: int = 0


class Chooser(Protocol):
    def choose(self, prompt: SimulatedPrompt, world: SimulatedWorkers) -> WorkerChoice: ...

    def computed(self, prompt: SimulatedPrompt, changes: Changes) -> None:
        """Handle the prefill worker's report that the prompt has been computed."""

    def loaded(self, prompt: SimulatedPrompt, changes: Changes) -> None:
        """Handle the prefill worker's report that blocks of the prompt were loaded from files."""

    def answered(self, prompt: SimulatedPrompt) -> None: ...


class _EventKind(IntEnum):
    """Kinds of events, in the order in which they happen at the same time."""

    ANSWERED = 0
    COMPUTED = 1
    LOADED = 2


@dataclass(slots=True)
class PlacementRun:
    """Results of one simulated trace."""

    prompts: list[SimulatedPrompt] = field(default_factory=list)  # in the order of their arrival
    decisions_us: list[float] = field(default_factory=list)
    mispredicted: int = 0  # prompts whose hits differed from what the policy expected
    token_gaps_ms: list[float] = field(default_factory=list)  # time between tokens, one value per answer


class PlacementSimulation:
    def __init__(self, world: SimulatedWorkers, chooser: Chooser) -> None:
        self._world = world
        self._chooser = chooser
        self._events: list[tuple[float, int, int, SimulatedPrompt]] = []
        self._numbers = count()
        self._run = PlacementRun()

    def run(self, arrivals: Sequence[TraceArrival]) -> PlacementRun:
        """Run the simulation. May be called once."""
        for number, arrival in enumerate(arrivals):
            self._until(arrival.at_s)
            self._arrive(SimulatedPrompt(number, arrival))
        self._until(float("inf"))
        return self._run

    def _arrive(self, prompt: SimulatedPrompt) -> None:
        began = time.perf_counter()
        choice = self._chooser.choose(prompt, self._world)
        self._run.decisions_us.append(1e6 * (time.perf_counter() - began))
        prompt.prefill, prompt.decode = choice.prefill, choice.decode
        worker, answering = self._world.prefill[choice.prefill], self._world.decode[choice.decode]
        prompt.expected_hit_blocks = choice.expected_hit_blocks
        prompt.expected_loaded_blocks = choice.expected_loaded_blocks
        worker.take(prompt)
        answering.tokens_in_flight += _answer_tokens(prompt)
        self._run.prompts.append(prompt)
        self._start(choice.prefill, prompt.arrival.at_s)

    def _until(self, moment_s: float) -> None:
        while self._events and self._events[0][0] <= moment_s:
            now, kind, _, prompt = heapq.heappop(self._events)
            if kind is _EventKind.COMPUTED:
                self._computed(prompt, now)
            elif kind is _EventKind.LOADED:
                self._chooser.loaded(prompt, self._world.prefill[prompt.prefill].end_loading())
                self._start(prompt.prefill, now)
            else:
                self._world.decode[prompt.decode].tokens_in_flight -= _answer_tokens(prompt)
                self._chooser.answered(prompt)

    def _computed(self, prompt: SimulatedPrompt, now: float) -> None:
        changes = self._world.prefill[prompt.prefill].finish()
        expected = prompt.expected_hit_blocks, prompt.expected_loaded_blocks
        self._run.mispredicted += (prompt.hit_blocks, prompt.loaded_blocks) != expected
        self._chooser.computed(prompt, changes)
        speeds = self._world.speeds
        load = self._world.decode[prompt.decode].tokens_in_flight
        gap_ms = speeds.token_gap_ms + speeds.token_gap_ms_per_token * load
        self._run.token_gaps_ms.append(gap_ms)
        self._add(now + prompt.arrival.output_tokens * gap_ms / 1e3, _EventKind.ANSWERED, prompt)
        self._start(prompt.prefill, now)

    def _start(self, worker: int, now: float) -> None:
        loading = self._world.prefill[worker].start_loading()
        if loading is not None:
            self._add(now + loading.load_s, _EventKind.LOADED, loading)
        prompt = self._world.prefill[worker].start(now)
        if prompt is not None:
            self._add(prompt.first_token_s, _EventKind.COMPUTED, prompt)

    def _add(self, at_s: float, kind: _EventKind, prompt: SimulatedPrompt) -> None:
        heapq.heappush(self._events, (at_s, kind, next(self._numbers), prompt))


def _answer_tokens(prompt: SimulatedPrompt) -> int:
    return prompt.arrival.input_tokens + min(prompt.arrival.output_tokens, CHARGED_ANSWER_TOKENS)
