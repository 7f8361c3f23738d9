"""The index against plain sets: who holds how many blocks of a chain, what is expected there, what is left of it."""

import random
import tracemalloc
from itertools import takewhile

import hypothesis.strategies as st
from hypothesis import given

from baton.router.cache.prefix_index import ELSEWHERE_CHAINS, PrefixIndex, hits_among

WORKERS = ("w0", "w1", "w2", "w3")


def name(path: str) -> bytes:
    """A block's hash: its whole path stands in it."""
    return path.encode().ljust(32, b".")


def chain(path: str) -> list[bytes]:
    return [name(path[: end + 1]) for end in range(len(path))]


def longest(held: set[bytes], hashes: list[bytes]) -> int:
    return len(list(takewhile(lambda each: each in held, hashes)))


paths = st.text(alphabet="xy", max_size=9)


@given(st.lists(st.tuples(st.sampled_from(WORKERS), paths), max_size=12), paths)
def test_one_walk_finds_the_blocks_of_each_worker(holdings: list[tuple[str, str]], asked: str) -> None:
    index, model = PrefixIndex(), {worker: set[bytes]() for worker in WORKERS}
    for worker, path in holdings:
        index.store(worker, chain(path))
        model[worker].update(chain(path))
    expected = {worker: blocks for worker in WORKERS if (blocks := longest(model[worker], chain(asked)))}
    assert index.hits(chain(asked)) == (expected, expected)
    assert {worker: index.blocks(worker) for worker in WORKERS} == {worker: len(model[worker]) for worker in WORKERS}
    assert len(index) == len(set().union(*model.values()))


@given(st.lists(st.tuples(st.sampled_from(["store", "evict", "expect", "settle", "forget"]), paths), max_size=20))
def test_ready_and_expected_blocks_are_distinguished(steps: list[tuple[str, str]]) -> None:
    index, ready, in_flight = PrefixIndex(), set[bytes](), dict[str, list[bytes]]()
    index.store("w1", chain("xxxyyy"))
    for what, path in steps:
        if what == "store":
            index.store("w0", chain(path))
            ready.update(chain(path))
        elif what == "evict":  # a subtree: a worker's cache is closed under parents
            gone = {each for each in ready if each.startswith(path.encode())} if path else set()
            gone -= set().union(*map(set, in_flight.values()))
            index.evict("w0", gone)
            ready -= gone
        elif what == "expect" and path not in in_flight:
            index.expect("w0", path, chain(path))
            in_flight[path] = chain(path)
        elif what == "settle":
            index.settle("w0", path)
            in_flight.pop(path, None)
            for other, hashes in in_flight.items():  # the others say it again: who expected it first has left
                index.expect("w0", (other, len(ready), what), hashes)
        elif what == "forget":
            index.forget("w0")
            ready, in_flight = set(), {}
    for path in ("xxxyyyxxx", "xyxyxyxyx", "yyyyyyyyy"):
        found, there = index.hits(chain(path))
        assert there.get("w0", 0) == longest(ready, chain(path))
        assert found.get("w0", 0) >= there.get("w0", 0)
        assert found.get("w0", 0) >= longest(ready | set().union(*map(set, in_flight.values())), chain(path))
    assert index.hits(chain("xxxyyyx")).ready["w1"] == 6


def test_predictions_of_other_routers_make_room_for_newer_ones() -> None:
    index = PrefixIndex()
    for number in range(ELSEWHERE_CHAINS + 1):
        index.expect_elsewhere("w0", [name(f"p{number}")])
    assert index.hits([name("p0")]).found == {}
    assert index.hits([name("p1")]).found == {"w0": 1}


def test_snapshot_replaces_blocks_and_keeps_expected_ones() -> None:
    index = PrefixIndex()
    index.store("w0", chain("xx"))
    index.expect("w0", 1, chain("xxy"))
    index.replace("w0", chain("xz"))
    assert index.hits(chain("xz")).ready == {"w0": 2}
    assert index.hits(chain("xx")).ready == {"w0": 1}
    assert index.blocks("w0") == 2
    other = PrefixIndex()
    other.store("w0", chain("xz"))
    assert index.digest("w0") == other.digest("w0")


def test_freed_slot_is_reused_by_the_next_worker_without_a_trace() -> None:
    index = PrefixIndex()
    for worker in WORKERS:
        index.store(worker, chain("xyx"))
    index.forget("w1")
    index.store("w9", chain("x"))
    assert index.hits(chain("xyx")).found == {"w0": 3, "w2": 3, "w3": 3, "w9": 1}


def test_more_workers_than_a_machine_word_has_bits() -> None:
    index, drawn, held = PrefixIndex(), random.Random(1), dict[str, int]()
    path = "x" * 300
    for number in range(200):
        held[f"w{number}"] = drawn.randrange(1, 300)
        index.store(f"w{number}", chain(path[: held[f"w{number}"]]))
    assert index.hits(chain(path)).ready == held


def test_prefix_index_ends_are_ordered_by_length_and_found_for_chosen_workers() -> None:
    index, chosen = PrefixIndex(), {f"w{number}" for number in range(0, 300, 7)}
    for number in range(300):
        index.store(f"w{number}", chain("xxxx" if number % 5 else "xx"))
        index.expect(f"w{number}", 1, chain("xxxxx"))
    ends = index.ends(chain("xxxxx"))
    assert [end.blocks for end in ends] == sorted((end.blocks for end in ends), reverse=True)
    everything, some = index.hits(chain("xxxxx")), hits_among(ends, chosen)
    assert some.found == dict.fromkeys(chosen, 5)
    assert some.ready == {name: blocks for name, blocks in everything.ready.items() if name in chosen}
    assert everything.ready["w1"] == 4 and everything.ready["w5"] == 2


def test_prefix_index_memory_of_a_block_does_not_grow_with_workers() -> None:
    blocks = 20

    def bytes_per_block(workers: int) -> float:
        hashes = [[random.randbytes(32) for _ in range(blocks)] for _ in range(workers)]
        tracemalloc.start()
        index = PrefixIndex()
        for number, each in enumerate(hashes):
            index.expect(f"w{number}", 1, each)
            for block_hash in each:  # one at a time, as an answer's blocks are reported
                index.store(f"w{number}", [block_hash])
            index.settle(f"w{number}", 1)
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return used / (workers * blocks)

    assert bytes_per_block(2550) < 1.5 * bytes_per_block(100)
