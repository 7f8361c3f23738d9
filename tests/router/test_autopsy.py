"""Why blocks of a prompt were missed: evicted, elsewhere, under another salt, never there."""

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.router.cache.autopsy import NOWHERE, CacheLook, EvictedRun, Fate, FateRun, Found, Held, SaltedNames, autopsy
from baton.router.cache.evictions import ALIKE_SHARE, MOST_EVICTIONS, MOST_RUNS, EvictionLog
from baton.router.cache.replica import Caches, CacheSnapshotPart, CacheUpdate
from baton.text.block_hash import block_hashes, root_hash

LENGTH, PROMPTS, KEPT = 6, 4, 3
WORKER = "w0"


def block(prompt: int, place: int) -> bytes:
    """Prompts 0 and 1 begin with the same two blocks, and so do 2 and 3."""
    return bytes([prompt // 2 * 2 if place < 2 else prompt, place]) * 16


CHAINS = [tuple(block(prompt, place) for place in range(LENGTH)) for prompt in range(PROMPTS)]


class Worker(RuleBasedStateMachine):
    """A worker stores prompts and evicts leaves; its router keeps few evictions. The model keeps all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.caches, self.now, self.sequence = Caches(), 100.0, 0
        self.caches.connected(WORKER)
        self.caches.take_snapshot(WORKER, CacheSnapshotPart(0, 0, 1, ()), self.now)
        self.evictions = self.caches._caches[WORKER].evictions
        self.evictions.most = KEPT
        self.there: set[bytes] = set()
        self.evicted_s: dict[bytes, float] = {}

    def change(self, stored: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        self.sequence += 1
        self.there = self.there - set(evicted) | set(stored)
        self.evicted_s |= dict.fromkeys(evicted, self.now)
        self.caches.take_changes(WORKER, CacheUpdate(self.sequence, tuple(stored), tuple(evicted)), self.now)

    def hits(self, chain: Sequence[bytes]) -> int:
        return next((place for place, each in enumerate(chain) if each not in self.there), len(chain))

    @rule(prompt=st.integers(0, PROMPTS - 1), length=st.integers(1, LENGTH))
    def store(self, prompt: int, length: int) -> None:
        self.change([each for each in CHAINS[prompt][:length] if each not in self.there], ())

    @rule(prompt=st.integers(0, PROMPTS - 1))
    def evict_leaf(self, prompt: int) -> None:
        chain = CHAINS[prompt]
        hits = self.hits(chain)
        others = {each for other in CHAINS if other is not chain for each in other[: self.hits(other)]}
        if hits and chain[hits - 1] not in others:
            self.change((), chain[hits - 1 : hits])

    @rule(seconds=st.floats(0.01, 30.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def agrees_with_the_model(self) -> None:
        for chain in CHAINS:
            hits = self.hits(chain)
            look = self.caches.look(WORKER, chain, hits, self.now)
            ages = [self.now - self.evicted_s[each] for each in chain[hits:] if each in self.evicted_s]
            told = sum(run.blocks for run in look.evicted)
            assert told <= len(ages), "nothing is called evicted that was not"
            remembered = [age_s for age_s in ages if age_s < look.known_s]
            assert told >= len(remembered), "all evictions of the known time are there"
            place = 0
            for run in look.evicted:
                of_run = ages[place : place + run.blocks]
                assert (run.least_age_s, run.most_age_s) == pytest.approx((min(of_run), max(of_run)))
                place += run.blocks
        assert len(self.evictions) <= KEPT + KEPT // 8


TestAgainstModel = Worker.TestCase
TestAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_blocks_that_went_together_are_one_run_and_others_are_not() -> None:
    evictions, chain = EvictionLog(), CHAINS[0]
    evictions.add(reversed(chain[4:]), now=10.0)
    evictions.add((chain[3],), now=10.5)
    evictions.add((chain[2],), now=60.0)
    assert evictions.runs(chain, 2, now=70.0) == (EvictedRun(1, 10.0, 10.0), EvictedRun(3, 59.5, 60.0))
    assert evictions.runs(chain, 1, now=70.0) == (), "the first missed block was never there"


def test_last_eviction_of_a_block_counts_and_is_kept_longest() -> None:
    evictions, chain = EvictionLog(most=2), CHAINS[0]
    for now, place in ((1.0, 0), (2.0, 1), (3.0, 0), (4.0, 2)):
        evictions.add((chain[place],), now)
    assert evictions.runs(chain, 0, now=5.0) == (EvictedRun(1, 2.0, 2.0),)
    assert evictions.known_s(now=5.0) == 3.0, "that of block 1 is forgotten"


def test_very_many_runs_end_in_a_summary() -> None:
    evictions, chain = EvictionLog(), [bytes([place]) * 32 for place in range(MOST_RUNS + 5)]
    for place, each in enumerate(reversed(chain)):
        evictions.add((each,), now=(1 + ALIKE_SHARE) ** (3 * place))
    runs = evictions.runs(chain, 0, now=1e6)
    assert len(runs) <= MOST_RUNS and sum(run.blocks for run in runs) == len(chain)


def test_many_workers_keep_fewer_evictions_each() -> None:
    caches = Caches()
    for number in range(200):
        caches.connected(f"w{number}")
    kept = [cache.evictions.most for cache in caches._caches.values()]
    assert sum(kept) <= MOST_EVICTIONS and min(kept) > 5_000


def test_unseen_evictions_count_and_assumed_blocks_do_not() -> None:
    caches, chain = Caches(), CHAINS[0]
    caches.connected(WORKER)
    caches.assume(WORKER, chain[:3], capacity_blocks=100)
    caches.take_snapshot(WORKER, CacheSnapshotPart(0, 0, 1, chain[:2]), now=10.0)
    assert caches.look(WORKER, chain, 2, now=20.0) == CacheLook(2, follows=True, known_s=10.0, evicted=())
    caches.disconnected(WORKER)
    assert not caches.look(WORKER, chain, 2, now=20.0).follows
    caches.connected(WORKER)
    caches.take_snapshot(WORKER, CacheSnapshotPart(5, 0, 1, chain[:1]), now=30.0)
    assert caches.look(WORKER, chain, 1, now=35.0).evicted == (EvictedRun(1, 5.0, 5.0),)


def test_evictions_before_a_restart_are_not_known() -> None:
    caches, chain = Caches(), CHAINS[0]
    caches.connected(WORKER)
    caches.take_snapshot(WORKER, CacheSnapshotPart(0, 0, 1, chain), now=0.0)
    caches.take_changes(WORKER, CacheUpdate(1, (), chain), now=1.0)
    assert caches.look(WORKER, chain, 0, now=2.0).evicted
    caches.forget(WORKER)
    assert caches.look(WORKER, chain, 0, now=3.0) == CacheLook(0, follows=False, known_s=0.0)
    caches.connected(WORKER)
    caches.take_snapshot(WORKER, CacheSnapshotPart(0, 0, 1, ()), now=4.0)
    assert caches.look(WORKER, chain, 0, now=5.0) == CacheLook(0, follows=True, known_s=1.0)


LOOK = CacheLook(2, follows=True, known_s=60.0, evicted=(EvictedRun(3, 4.0, 5.0), EvictedRun(1, 30.0, 30.0)))


def test_each_missed_block_has_one_fate() -> None:
    assert autopsy(12, LOOK, Found(2), Held("d0", 4), Held("p1", 9)) == (
        FateRun(0, 2, Fate.CACHED),
        FateRun(2, 2, Fate.EVICTED, "d0", 4.0, 5.0),
        FateRun(4, 1, Fate.EVICTED, "", 4.0, 5.0),
        FateRun(5, 1, Fate.EVICTED, "", 30.0, 30.0),
        FateRun(6, 3, Fate.OTHER_SALT, "p1"),
        FateRun(9, 3, Fate.NEVER),
    )


def test_fetched_blocks_are_not_called_evicted() -> None:
    runs = autopsy(8, LOOK, Found(2, 4, "d0"), Held("d0", 7))
    assert [(run.first, run.blocks, run.fate) for run in runs] == [
        (0, 2, Fate.CACHED),
        (2, 4, Fate.FETCHED),
        (6, 1, Fate.ELSEWHERE),
        (7, 1, Fate.NEVER),
    ]


def test_blocks_from_files_follow_those_in_memory_and_are_not_called_evicted() -> None:
    runs = autopsy(8, LOOK, Found(2, 1, "d0", 4), Held("d0", 3))
    assert [(run.first, run.blocks, run.fate, run.worker) for run in runs] == [
        (0, 2, Fate.CACHED, ""),
        (2, 1, Fate.FETCHED, "d0"),
        (3, 4, Fate.LOADED, ""),
        (7, 1, Fate.NEVER, ""),
    ]


def test_blocks_that_were_expected_and_not_found_are_gone() -> None:
    runs = autopsy(4, CacheLook(3, follows=True, known_s=9.0), Found(1))
    assert [(run.blocks, run.fate) for run in runs] == [(1, Fate.CACHED), (2, Fate.GONE), (1, Fate.NEVER)]


def test_nothing_is_claimed_of_a_worker_without_events() -> None:
    runs = autopsy(4, CacheLook(1, follows=False, known_s=0.0), None)
    assert [(run.blocks, run.fate) for run in runs] == [(1, Fate.EXPECTED), (3, Fate.UNKNOWN)]


def test_prompt_that_had_to_be_computed_as_a_whole_missed_nothing() -> None:
    assert autopsy(4, None, Found(0), Held("d0", 4)) == (FateRun(0, 4, Fate.UNUSED),)
    assert autopsy(0, LOOK, Found(0)) == ()


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.integers(0, 30),
    hits=st.integers(0, 30),
    evicted=st.lists(st.integers(1, 5), max_size=4),
    found=st.none() | st.builds(Found, st.integers(0, 30), st.integers(0, 9)),
    elsewhere=st.integers(0, 40),
    salted=st.integers(0, 40),
)
def test_fates_cover_the_prompt_in_order_without_gaps(
    blocks: int, hits: int, evicted: list[int], found: Found | None, elsewhere: int, salted: int
) -> None:
    look = CacheLook(hits, True, 1.0, tuple(EvictedRun(each, 1.0, 2.0) for each in evicted))
    runs = autopsy(blocks, look, found, Held("a", elsewhere), Held("b", salted) if salted else NOWHERE)
    assert [place for run in runs for place in range(run.first, run.first + run.blocks)] == list(range(blocks))


TOKENS, BLOCK_TOKENS = range(40), 4
PLAIN, MINE, YOURS = (
    block_hashes(root_hash(b"f", "float32", cache_salt=salt), TOKENS, BLOCK_TOKENS) for salt in ("", "mine", "yours")
)


@pytest.fixture
def caches() -> Caches:
    """`p0` has four blocks without a salt, `p1` six of them, and three under `yours`."""
    caches = Caches()
    for worker, blocks in (("p0", PLAIN[:4]), ("p1", PLAIN[:6] + YOURS[:3])):
        caches.connected(worker)
        caches.take_snapshot(worker, CacheSnapshotPart(0, 0, 1, blocks), now=0.0)
    return caches


def test_salted_prompt_finds_the_same_tokens_without_a_salt(caches: Caches) -> None:
    assert caches.under_other_salt(MINE, PLAIN, "p1") == Held("p1", 6)
    assert caches.under_other_salt(MINE, PLAIN[:2], "p0") == Held("p0", 2), "on the worker that is asked about"
    assert caches.under_other_salt(MINE, PLAIN[:2], "p1") == Held("p1", 2)
    assert caches.under_other_salt(MINE, PLAIN, "p0") == Held("p1", 6), "or where there is most"


def test_unsalted_prompt_finds_equal_tokens_under_a_known_salt(caches: Caches) -> None:
    assert caches.under_other_salt(PLAIN, PLAIN, "p0") == NOWHERE, "its own blocks do not count"
    caches.salted(YOURS, PLAIN)
    assert caches.under_other_salt(PLAIN, PLAIN, "p0") == Held("p1", 3)


def test_two_salts_find_each_other(caches: Caches) -> None:
    caches.forget("p0")
    caches.take_snapshot("p1", CacheSnapshotPart(1, 0, 1, YOURS[:3]), now=1.0)
    assert caches.under_other_salt(MINE, PLAIN, "p1") == NOWHERE
    caches.salted(YOURS, PLAIN)
    assert caches.under_other_salt(MINE, PLAIN, "p1") == Held("p1", 3)
    caches.salted(MINE, PLAIN)
    assert caches.under_other_salt(MINE, PLAIN, "p1") == NOWHERE, "of a block the newest salt is kept"


def test_blocks_under_different_salts_on_different_workers_do_not_add_up(caches: Caches) -> None:
    caches.take_snapshot("p0", CacheSnapshotPart(1, 0, 1, MINE[:1]), now=1.0)
    caches.salted(YOURS, PLAIN)
    caches.salted(MINE[:1], PLAIN)
    assert caches.under_other_salt(PLAIN, PLAIN, "p0") == Held("p0", 1)


def test_where_the_names_without_a_salt_are_not_known_nothing_is_found(caches: Caches) -> None:
    assert caches.under_other_salt(MINE, (), "p0") == NOWHERE


def test_names_are_bounded_and_the_oldest_go() -> None:
    names = SaltedNames(most_blocks=4)
    names.add(PLAIN[:3], MINE[:3])
    names.add(PLAIN[:1], MINE[:1])
    names.add(PLAIN[3:6], MINE[3:6])
    assert len(names) == 4
    assert names.others(PLAIN[0], b"") == (PLAIN[0], MINE[0])
    assert names.others(PLAIN[1], b"") == (PLAIN[1],)
