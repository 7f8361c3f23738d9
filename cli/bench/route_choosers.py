"""The placement of prompts in the simulation: the router's own code, behind the interface of the baselines."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from cli.bench.route_trace import BLOCK_TOKENS
from cli.bench.route_world import Changes, Prompt, World
from router.branching import Branching
from router.candidates import PlacementRequest, WorkerView
from router.placement import NoPrefillWorker, Placement, PlacementPolicy, Strategy, place
from router.policies.prefix_hash import early_block
from router.prefix_index import PrefixIndex
from router.rates import RateLedger
from router.recent_work import RecentWork
from router.shortlist import shortlist
from router.worker import WorkerRole

FINGERPRINT = b"simulated"
BOUNDLESS = 1 << 40  # decode workers have room for all in the simulation


class Choice(NamedTuple):
    prefill: int
    decode: int
    expected_hit_blocks: int


class Chooser(Protocol):
    def choose(self, prompt: Prompt, world: World) -> Choice: ...

    def computed(self, prompt: Prompt, changes: Changes) -> None:
        """Its prefill worker's report when the prompt is done."""

    def answered(self, prompt: Prompt) -> None: ...


class PlacedByRouter:
    """The prefix index, the measured rates and the placement of the router, with the reports of real workers."""

    def __init__(self, strategy: Strategy, workers: int) -> None:
        self._policy = PlacementPolicy(NoPrefillWorker.QUEUE, strategy=strategy)
        self._index, self._rates, self._recent = PrefixIndex(), RateLedger(), RecentWork()
        self._prefill, self._decode = ([f"{role}{n}" for n in range(workers)] for role in "pd")
        self._branching = Branching()
        self._number = {name: number for names in (self._prefill, self._decode) for number, name in enumerate(names)}

    def choose(self, prompt: Prompt, world: World) -> Choice:
        arrival = prompt.arrival
        found = self._index.hits(arrival.blocks).found  # of prefill workers: nothing is said of the others' caches
        request = PlacementRequest(
            fingerprint=FINGERPRINT,
            block_tokens=BLOCK_TOKENS,
            prompt_tokens=arrival.input_tokens,
            max_tokens=arrival.output_tokens,
            choices=1,
            turn=prompt.number,
            prefix=early_block(arrival.blocks, BLOCK_TOKENS),
        )
        prefill = shortlist(self._prefill, found, prompt.number)
        views = [self._prefill_view(name, found.get(name, 0), arrival.blocks, world) for name in prefill]
        views += [self._decode_view(name, world) for name in shortlist(self._decode, {}, prompt.number)]
        placement = place(request, views, self._policy)
        if not isinstance(placement, Placement) or placement.prefill is None:
            raise RuntimeError(f"the simulation has room for all, but: {placement}")
        self._branching.placed(arrival.blocks, placement.prefill_hit_tokens // BLOCK_TOKENS)
        self._index.expect(placement.prefill, prompt.number, arrival.blocks)
        computed = arrival.input_tokens - placement.prefill_hit_tokens
        rate = self._rates.of(placement.prefill).prefill_tokens_per_s
        self._recent.add(placement.prefill, computed, rate * len(self._prefill))
        numbers = self._number[placement.prefill], self._number[placement.decode]
        return Choice(*numbers, placement.prefill_hit_tokens // BLOCK_TOKENS)

    def computed(self, prompt: Prompt, changes: Changes) -> None:
        name = self._prefill[prompt.prefill]
        self._index.store(name, changes.stored)
        self._index.evict(name, changes.evicted)
        self._index.settle(name, prompt.number)
        self._rates.computed(name, prompt.computed_tokens, 1e3 * (prompt.first_token_s - prompt.started_s))

    def answered(self, prompt: Prompt) -> None:
        """The traces do not show which answers are part of later prompts: nothing is stored."""

    def _prefill_view(self, name: str, hit_blocks: int, blocks: Sequence[bytes], world: World) -> WorkerView:
        return WorkerView(
            endpoint=name,
            role=WorkerRole.PREFILL,
            fingerprint=FINGERPRINT,
            total_blocks=BOUNDLESS,
            total_slots=0,
            limit_blocks=0,
            limit_slots=0,
            tokens_in_flight=world.prefill[self._number[name]].tokens_in_flight,
            hit_blocks=hit_blocks,
            recent_tokens=self._recent.of(name),
            branches=self._branching.behind(blocks, hit_blocks),
            rates=self._rates.of(name),
        )

    def _decode_view(self, name: str, world: World) -> WorkerView:
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
