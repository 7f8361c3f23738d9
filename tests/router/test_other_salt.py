"""Equal tokens under another salt are found, in either direction, first on the worker that is asked about."""

import pytest

from baton.router.cache.autopsy import NOWHERE, Held, SaltedNames
from baton.router.cache.replica import Caches, CacheSnapshotPart
from baton.text.block_hash import block_hashes, root_hash

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


def test_a_salted_prompt_finds_the_same_tokens_without_a_salt(caches: Caches) -> None:
    assert caches.under_other_salt(MINE, PLAIN, "p1") == Held("p1", 6)
    assert caches.under_other_salt(MINE, PLAIN[:2], "p0") == Held("p0", 2), "on the worker that is asked about"
    assert caches.under_other_salt(MINE, PLAIN[:2], "p1") == Held("p1", 2)
    assert caches.under_other_salt(MINE, PLAIN, "p0") == Held("p1", 6), "or where there is most"


def test_a_prompt_without_a_salt_finds_the_same_tokens_under_one_that_was_seen(caches: Caches) -> None:
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
