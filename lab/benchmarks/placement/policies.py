"""The placement of Baton's router and the policies of other routers, behind one interface.

A policy may read the whole state of the simulated workers, but uses only what the router it stands for would know.
"""

import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from baton.lab.benchmarks.placement.simulation import (
    BlockCache,
    Changes,
    PrefillWorker,
    SimulatedPrompt,
    SimulatedWorkers,
    WorkerChoice,
)
from baton.lab.benchmarks.placement.traces import BLOCK_TOKENS, blocks_of
from baton.process.registry.worker_record import WorkerRole
from baton.router.cache.fan_out import PrefixFanOut
from baton.router.cache.prefix_index import PrefixIndex, hits_among
from baton.router.placement.cluster import RecentWork, shortlist
from baton.router.placement.decide import NoPrefillWorker, Placement, PlacementPolicy, place
from baton.router.placement.policies import Strategy
from baton.router.placement.rates import RateLedger
from baton.router.types.placement import PlacementRequest, WorkerView, early_block

FINGERPRINT = b"simulated"
BOUNDLESS = 1 << 40  # blocks and slots: in the simulation no worker is ever full


class PlacedByRouter:
    """The router's prefix index, rate measurement and placement, fed with what real workers would report."""

    def __init__(self, strategy: Strategy, workers: int) -> None:
        self._policy = PlacementPolicy(NoPrefillWorker.QUEUE, 0, strategy)
        self._index, self._rates, self._recent = PrefixIndex(), RateLedger(), RecentWork()
        self._prefill, self._decode = ([f"{role}{n}" for n in range(workers)] for role in "pd")
        self._branching = PrefixFanOut()
        self._load_ms: dict[int, float] = {}  # predicted load time by prompt number, until the prefill ends
        self._loading_ms: defaultdict[str, float] = defaultdict(float)
        self._number = {name: number for names in (self._prefill, self._decode) for number, name in enumerate(names)}

    def choose(self, prompt: SimulatedPrompt, world: SimulatedWorkers) -> WorkerChoice:
        arrival = prompt.arrival
        ends = self._index.ends(arrival.blocks)
        found = hits_among(ends).found  # only prefill workers report their caches here
        request = PlacementRequest(
            fingerprint=FINGERPRINT,
            block_tokens=BLOCK_TOKENS,
            prompt_tokens=arrival.input_tokens,
            max_tokens=arrival.output_tokens,
            choices=1,
            turn=prompt.number,
            prefix=early_block(arrival.blocks, BLOCK_TOKENS),
        )
        prefixes = [(blocks, named.found) for blocks, named in ends]
        prefill = shortlist(self._prefill, self._number.keys(), prefixes, prompt.number)
        views = [self._prefill_view(name, found.get(name, 0), arrival.blocks, world) for name in prefill]
        views += [self._decode_view(name, world) for name in shortlist(self._decode, set(), (), prompt.number)]
        placement = place(request, views, self._policy)
        if not isinstance(placement, Placement) or placement.prefill is None:
            raise RuntimeError(f"no worker is ever full in the simulation, but placement failed: {placement}")
        known_tokens = placement.prefill_hit_tokens + placement.loaded_tokens
        self._branching.placed(arrival.blocks, known_tokens // BLOCK_TOKENS)
        self._index.expect(placement.prefill, prompt.number, arrival.blocks)
        computed = arrival.input_tokens - known_tokens
        rate = self._rates.of(placement.prefill).prefill_tokens_per_s
        self._recent.add(placement.prefill, computed, rate * len(self._prefill))
        self._load_ms[prompt.number] = placement.load_ms
        self._loading_ms[placement.prefill] += placement.load_ms
        numbers = self._number[placement.prefill], self._number[placement.decode]
        hit_blocks, loaded_blocks = (
            placement.prefill_hit_tokens // BLOCK_TOKENS,
            placement.loaded_tokens // BLOCK_TOKENS,
        )
        return WorkerChoice(*numbers, hit_blocks, loaded_blocks)

    def computed(self, prompt: SimulatedPrompt, changes: Changes) -> None:
        self.loaded(prompt, changes)
        name = self._prefill[prompt.prefill]
        self._loading_ms[name] -= self._load_ms.pop(prompt.number)
        self._index.settle(name, prompt.number)
        self._rates.computed(name, prompt.computed_tokens, 1e3 * (prompt.first_token_s - prompt.started_s))

    def loaded(self, prompt: SimulatedPrompt, changes: Changes) -> None:
        name = self._prefill[prompt.prefill]
        self._index.store(name, changes.stored)
        self._index.evict(name, changes.evicted)

    def answered(self, prompt: SimulatedPrompt) -> None:
        """Store nothing: the traces do not show which answers are part of later prompts."""

    def _prefill_view(self, name: str, hit_blocks: int, blocks: Sequence[bytes], world: SimulatedWorkers) -> WorkerView:
        worker, options = world.prefill[self._number[name]], world.file_options
        tier_blocks = worker.in_files(blocks, hit_blocks) if options is not None and options.known else 0
        return WorkerView(
            endpoint=name,
            role=WorkerRole.PREFILL,
            fingerprint=FINGERPRINT,
            total_blocks=BOUNDLESS,
            total_slots=0,
            limit_blocks=0,
            limit_slots=0,
            tokens_in_flight=worker.tokens_in_flight,
            hit_blocks=hit_blocks,
            recent_tokens=self._recent.of(name),
            branches=self._branching.behind(blocks, hit_blocks + tier_blocks),
            rates=self._rates.of(name),
            tier_blocks=tier_blocks,
            tier_block_bytes=worker.costs.block_bytes if worker.costs is not None else 0,
            loading_ms=max(0.0, self._loading_ms[name]),
            load_bytes_per_s=(worker.costs.load_bytes_per_s or 0.0) if worker.costs is not None else 0.0,
        )

    def _decode_view(self, name: str, world: SimulatedWorkers) -> WorkerView:
        return WorkerView(
            endpoint=name,
            role=WorkerRole.DECODE,
            fingerprint=FINGERPRINT,
            total_blocks=BOUNDLESS,
            total_slots=BOUNDLESS,
            limit_blocks=BOUNDLESS,
            limit_slots=BOUNDLESS,
            tokens_in_flight=world.decode[self._number[name]].tokens_in_flight,
            rates=self._rates.of(name),
        )


class Baseline(ABC):
    """Policy that chooses the prefill worker. The decode worker is that with the fewest tokens in flight."""

    def choose(self, prompt: SimulatedPrompt, world: SimulatedWorkers) -> WorkerChoice:
        prefill = self.prefill(prompt, world)
        decode = min(range(len(world.decode)), key=lambda number: world.decode[number].tokens_in_flight)
        return WorkerChoice(prefill, decode, world.prefill[prefill].cache.hit_blocks(prompt.arrival.blocks))

    @abstractmethod
    def prefill(self, prompt: SimulatedPrompt, world: SimulatedWorkers) -> int:
        """Return the number of the chosen prefill worker."""

    def computed(self, prompt: SimulatedPrompt, changes: Changes) -> None:
        return

    def loaded(self, prompt: SimulatedPrompt, changes: Changes) -> None:
        return

    def answered(self, prompt: SimulatedPrompt) -> None:
        return


class Random(Baseline):
    def __init__(self) -> None:
        self._draw = random.Random(0)

    def prefill(self, prompt: SimulatedPrompt, world: SimulatedWorkers) -> int:
        return self._draw.randrange(len(world.prefill))


class LeastLoad(Baseline):
    """Policy: the worker with the fewest requests in flight."""

    def prefill(self, prompt: SimulatedPrompt, world: SimulatedWorkers) -> int:
        return _least(world.prefill, lambda worker: worker.requests_in_flight, prompt.number)


class LongestPrefix(Baseline):
    """Policy: the worker with the longest cached prefix; ties go to the fewest requests in flight."""

    def prefill(self, prompt: SimulatedPrompt, world: SimulatedWorkers) -> int:
        hits = world.hit_blocks(prompt.arrival.blocks)
        workers = range(len(hits))
        return max(workers, key=lambda number: (hits[number], -world.prefill[number].requests_in_flight))


class SglangCacheAware(Baseline):
    """Policy `cache_aware` of SGLang's router, as its README describes it, with its default thresholds.

    The router keeps a tree of the prompts sent to each worker and evicts old leaves beyond 2^24 tokens. If the most
    loaded worker has over 64 requests more than the least loaded, and over 1.5 times as many, the least loaded is
    chosen. Otherwise it is the worker whose tree matches the longest prefix if that is over 0.3 of the prompt, else the
    one with the smallest tree.
    """

    CACHE_THRESHOLD, BALANCE_ABS, BALANCE_REL = 0.3, 64, 1.5
    TREE_BLOCKS = (1 << 24) // BLOCK_TOKENS

    def __init__(self) -> None:
        self._trees: list[BlockCache] = []

    def prefill(self, prompt: SimulatedPrompt, world: SimulatedWorkers) -> int:
        workers = range(len(world.prefill))
        if not self._trees:
            self._trees = [BlockCache(self.TREE_BLOCKS) for _ in workers]
        loads = [worker.requests_in_flight for worker in world.prefill]
        taken = self._match(prompt)
        if max(loads) - min(loads) > self.BALANCE_ABS and max(loads) > self.BALANCE_REL * min(loads):
            taken = min(workers, key=loads.__getitem__)
        self._trees[taken].insert(prompt.arrival.blocks)
        return taken

    def _match(self, prompt: SimulatedPrompt) -> int:
        blocks = prompt.arrival.blocks
        workers = range(len(self._trees))
        matched = [tree.hit_blocks(blocks) for tree in self._trees]
        best = max(workers, key=matched.__getitem__)
        if blocks and matched[best] / len(blocks) > self.CACHE_THRESHOLD:
            return best
        return min(workers, key=lambda number: len(self._trees[number]))


class Dynamo(Baseline):
    """KV router of Dynamo, as its documentation describes it. It chooses the worker with the lowest

        overlap_score_weight * prefill blocks + decode blocks

    with weight 1 and temperature 0. Prefill blocks are those that the worker still has to compute, with this prompt;
    decode blocks are those of the prompts and answers that are active there. With `answers_elsewhere`, workers only
    compute prompts, and decode blocks are those of the prompts in flight. Ties go to the worker with the fewest
    requests in flight.
    """

    OVERLAP_SCORE_WEIGHT = 1.0

    def __init__(self, answers_elsewhere: bool) -> None:
        self._answers_elsewhere = answers_elsewhere
        self._active_blocks: dict[int, int] = {}  # number of blocks by worker

    def prefill(self, prompt: SimulatedPrompt, world: SimulatedWorkers) -> int:
        hits = world.hit_blocks(prompt.arrival.blocks)
        workers = range(len(hits))
        logits = [self._logit(prompt, world.prefill[number], number, hits[number]) for number in workers]
        taken = min(workers, key=lambda number: (logits[number], world.prefill[number].requests_in_flight))
        self._active_blocks[taken] = self._active_blocks.get(taken, 0) + _active_blocks(prompt)
        return taken

    def computed(self, prompt: SimulatedPrompt, changes: Changes) -> None:
        if self._answers_elsewhere:
            self._active_blocks[prompt.prefill] -= _active_blocks(prompt)

    def answered(self, prompt: SimulatedPrompt) -> None:
        if not self._answers_elsewhere:
            self._active_blocks[prompt.prefill] -= _active_blocks(prompt)

    def _logit(self, prompt: SimulatedPrompt, worker: PrefillWorker, number: int, hit_blocks: int) -> float:
        new_tokens = prompt.arrival.input_tokens - BLOCK_TOKENS * hit_blocks
        prefill_blocks = (worker.tokens_in_flight + new_tokens) / BLOCK_TOKENS
        return self.OVERLAP_SCORE_WEIGHT * prefill_blocks + self._active_blocks.get(number, 0)


def _active_blocks(prompt: SimulatedPrompt) -> int:
    return blocks_of(prompt.arrival.input_tokens)


def _least(workers: Sequence[PrefillWorker], load: Callable[[PrefillWorker], int], turn: int) -> int:
    """Return the number of the least loaded worker; those with equal load take turns."""
    loads = [load(worker) for worker in workers]
    least = min(loads)
    equal = [number for number, each in enumerate(loads) if each == least]
    return equal[turn % len(equal)]


BASELINES: Mapping[str, Callable[[], Baseline]] = {
    "random": Random,
    "least_load": LeastLoad,
    "longest_prefix": LongestPrefix,
    "sglang": SglangCacheAware,
    "dynamo": lambda: Dynamo(answers_elsewhere=False),
    "dynamo_pd": lambda: Dynamo(answers_elsewhere=True),
}
