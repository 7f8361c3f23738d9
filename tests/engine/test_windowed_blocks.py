"""Blocks of layers with a window are given back once it has passed them, and prefixes are found without them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import DecoderConfig
from baton.engine.kv_cache.block_pool import BlockError, BlockPool, OutOfBlocks
from baton.engine.kv_cache.block_table import acquire
from baton.engine.kv_cache.groups import layer_groups
from baton.engine.kv_cache.layout import kv_layout
from baton.engine.kv_cache.named_blocks import NamedBlocks
from baton.engine.kv_cache.sizing import KvSizing, size_pool
from baton.engine.kv_cache.swap_space import SwapSpace
from baton.engine.request import BlockSwap, Computed, Drawn, FirstToken, Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from baton.kernels import attention
from baton.text.block_groups import ONE_GROUP, BlockGroups, charged_blocks
from baton.text.block_hash import block_hashes, root_hash
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import PagedModel, answered, random_prompt, token_ids, unlikely

BLOCK = 4
GROUPS = BlockGroups(1, 2, window_tokens=8, block_tokens=BLOCK)  # a column is three blocks, two of them windowed
ROOT = root_hash(b"model", "float32")


ConfigOf = Callable[[Sequence[int | None], int], DecoderConfig]


@pytest.fixture(scope="module")
def config_of(tmp_path_factory: pytest.TempPathFactory) -> ConfigOf:
    """Of a decoder with such a window in each layer, and so many positions."""
    folder = tmp_path_factory.mktemp("config")
    stated = json.loads((Path(__file__).parents[1] / "fixtures/configs/gpt-oss-20b.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated))
    config = read_model_config(folder)
    assert isinstance(config, DecoderConfig)

    def made(windows: Sequence[int | None], max_positions: int) -> DecoderConfig:
        return replace(config, num_layers=len(windows), sliding_window=tuple(windows), max_positions=max_positions)

    return made


def prompt(tokens: int) -> tuple[int, ...]:
    return tuple(range(100, 100 + tokens))


def names(tokens: int) -> tuple[bytes, ...]:
    return block_hashes(ROOT, prompt(tokens), BLOCK)


def request(number: int, tokens: int, max_tokens: int = 24, prefill_only: bool = False) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(number, prompt(tokens), params, names(tokens), prefill_only=prefill_only)


def step(scheduler: Scheduler) -> None:
    plan = scheduler.plan()
    assert plan is not None
    results = [Computed(tuple(Drawn(7, 0.0) for _ in chunk.samples)) for chunk in plan.chunks]
    scheduler.commit(plan, results)


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(60, GROUPS)


@pytest.fixture
def scheduler(pool: BlockPool) -> Scheduler:
    return Scheduler(pool, BLOCK, max_step_tokens=64, max_sequences=4, swap=SwapSpace(60))


def test_an_answer_holds_all_blocks_of_some_layers_and_a_window_of_the_others(scheduler: Scheduler) -> None:
    scheduler.add(request(1, tokens=21))
    step(scheduler)
    for _ in range(20):
        step(scheduler)
        [sequence] = scheduler.batch.running
        first_seen = sequence.computed_tokens - GROUPS.window_tokens
        columns = -(-sequence.computed_tokens // BLOCK)
        assert scheduler.pool.counts.held == columns + 2 * (columns - first_seen // BLOCK)
    assert columns == 11


def test_without_a_cache_they_are_free_at_once(scheduler: Scheduler) -> None:
    scheduler.add(Request(1, prompt(21), SamplingParams(max_tokens=9), ()))
    step(scheduler)
    assert scheduler.pool.counts.held + scheduler.pool.counts.free == 60
    assert scheduler.pool.counts.held == 6 + 2 * 3


def test_a_turn_goes_on_behind_the_turn_before_it(pool: BlockPool) -> None:
    first = acquire(pool, (), columns=6)
    first.table.publish(names(24))
    first.table.pass_over(4)
    first.table.release()
    again = acquire(pool, names(24), columns=7)
    assert again.cached_columns == 6
    assert again.table.first_live == 4
    assert len(again.table.held_blocks) == 6 + 2 * 2 + 3


def test_a_prefix_whose_window_was_evicted_is_found_as_far_as_a_window_is_there(pool: BlockPool) -> None:
    first = acquire(pool, (), columns=6)
    first.table.publish(names(24))
    first.table.release()
    [block] = pool.touch([GROUPS.name(names(24)[4], group=1)])
    pool.distrust([block])
    assert pool.known_columns(names(24)) == 4
    assert acquire(pool, names(24), columns=6).cached_columns == 4


@pytest.mark.parametrize("whole", [0, 1])
def test_known_columns_of_an_unknown_prompt_take_one_lookup_per_window(whole: int) -> None:
    groups, looked_up = BlockGroups(whole, 2, window_tokens=32, block_tokens=BLOCK), list[bytes]()

    def has(name: bytes) -> bool:
        looked_up.append(name)
        return False

    assert groups.known_columns(names(1600), has) == 0
    assert len(looked_up) <= 400 / (32 / BLOCK) + 1


@given(st.integers(0, 1), st.integers(1, 12), st.sets(st.tuples(st.integers(0, 9), st.integers(0, 2))))
def test_known_columns_are_the_longest_prefix_whose_window_is_known(
    whole: int, window_tokens: int, unknown: set[tuple[int, int]]
) -> None:
    groups, hashes = BlockGroups(whole, 2, window_tokens, BLOCK), names(40)
    lost = {groups.name(hashes[column], group) for column, group in unknown}
    known = [count for count in range(11) if lost.isdisjoint(groups.names(hashes[:count]))]
    assert groups.known_columns(hashes, lambda name: name not in lost) == max(known)


def test_blocks_behind_a_window_are_evicted_before_all_others(pool: BlockPool) -> None:
    table = acquire(pool, (), columns=10).table
    table.publish(names(40))
    table.pass_over(8)
    table.release()
    held = pool.allocate(pool.counts.free + 16)
    assert pool.known_columns(names(40)) == 10, "the 16 that were passed have gone, and nothing else"
    pool.allocate(1)
    assert pool.known_columns(names(40)) < 10
    assert len(held) == 60 - 14


def test_a_landing_prompt_takes_no_block_that_no_window_reads(scheduler: Scheduler) -> None:
    reservation = scheduler.reserve(request(1, tokens=40))
    assert reservation is not None
    assert len(reservation.blocks) == 10 + 2 * 2
    assert scheduler.pool.counts.held == 10 + 2 * 2 + 3, "and a column to continue in"
    scheduler.activate(1, [FirstToken(0, 7, 0.0, None)])
    step(scheduler)


def test_both_sides_of_a_hand_over_name_the_same_blocks(pool: BlockPool) -> None:
    prefill = Scheduler(pool, BLOCK, 12, max_sequences=4)
    prefill.add(request(1, tokens=29, prefill_only=True))
    offered: list[int] = []
    for _ in range(3):
        plan = prefill.plan()
        assert plan is not None
        results = [Computed(tuple(Drawn(7, 0.0) for _ in chunk.samples)) for chunk in plan.chunks]
        [outcome] = prefill.commit(plan, results)
        offered += outcome.new_blocks  # type: ignore[union-attr]
    reservation = Scheduler(BlockPool(60, GROUPS), BLOCK, 64, 4).reserve(request(1, tokens=29))
    assert reservation is not None
    assert len(offered) == len(reservation.blocks) == 8 + 2 * 3


def test_of_a_prompt_that_did_not_land_whole_columns_stay(scheduler: Scheduler) -> None:
    reservation = scheduler.reserve(request(1, tokens=24))
    assert reservation is not None
    assert len(reservation.blocks) == 6 + 2 * 2
    scheduler.abort(1, landed_blocks=8)  # four columns that no window reads, one more, and a block of the last
    again = scheduler.reserve(request(2, tokens=24))
    assert again is not None
    assert (again.cached_blocks, again.cached_tokens) == (4 + 3, 20)


@pytest.mark.parametrize(("landed", "columns"), [(0, 0), (3, 3), (4, 4), (6, 4), (7, 5), (9, 5), (10, 6)])
def test_columns_are_complete_with_their_last_needed_block(landed: int, columns: int) -> None:
    assert GROUPS.complete_columns(landed, first_live=4) == columns


def test_a_preempted_answer_comes_back_without_what_its_windows_had_passed(pool: BlockPool) -> None:
    scheduler = Scheduler(pool, BLOCK, 64, max_sequences=4, swap=SwapSpace(60))
    scheduler.add(Request(1, prompt(30), SamplingParams(max_tokens=40), ()))
    step(scheduler)
    [sequence] = scheduler.batch.running
    swaps = scheduler.batch.preempt(sequence)
    assert len(swaps) == 8 + 2 * 3
    assert pool.counts.held == 0
    plan = scheduler.plan()
    assert plan is not None
    assert [swap.host_slot for swap in plan.swaps_in] == [swap.host_slot for swap in swaps]
    assert pool.counts.held == 8 + 2 * 3


def test_of_a_preempted_answer_with_a_cached_prefix_only_the_rest_comes_back(pool: BlockPool) -> None:
    scheduler = Scheduler(pool, BLOCK, 64, max_sequences=4, swap=SwapSpace(60))
    scheduler.add(request(1, tokens=30), ROOT)
    step(scheduler)
    [sequence] = scheduler.batch.running
    blocks = sequence.held().held(7, 8)
    slots = {swap.block: swap.host_slot for swap in scheduler.batch.preempt(sequence)}
    plan = scheduler.plan()
    assert plan is not None
    table = sequence.held()
    assert plan.swaps_in == tuple(
        BlockSwap(here, slots[there]) for here, there in zip(table.held(7, 8), blocks, strict=True)
    )
    assert table.first_live == 5


def test_blocks_for_a_fetch_are_named_windows_first_and_published_behind_their_parents(pool: BlockPool) -> None:
    links = GROUPS.links(names(24))
    assert [link.name for link in links[4:]] == list(names(24))
    fetched = NamedBlocks(pool, links, GROUPS.windowed_links(6))
    fetched.publish(7)  # three of the others: no window of theirs is among the first four
    assert pool.known_columns(names(24)) == 0
    fetched.publish(10)
    fetched.release()
    assert pool.known_columns(names(24)) == 6
    assert pool.counts.cached == 10
    pool.check_conservation()
    with pytest.raises(BlockError):
        fetched.release()


def test_prefix_of_windows_alone_is_found_by_its_last_window() -> None:
    groups = BlockGroups(0, 1, window_tokens=8, block_tokens=BLOCK)
    pool = BlockPool(12, groups)
    first = acquire(pool, (), columns=6)
    first.table.publish(names(24))
    first.table.pass_over(4)
    assert len(first.table.held_blocks) == 2
    first.table.release()
    pool.allocate(6 + 4)  # evicts the blocks that the window has passed
    again = acquire(pool, names(24), columns=6)
    assert (again.cached_columns, again.table.first_live, len(again.table.held_blocks)) == (6, 4, 2)
    pool.check_conservation()


def test_landing_prompt_of_windows_alone_counts_no_hit_without_a_block() -> None:
    groups = BlockGroups(0, 1, window_tokens=8, block_tokens=BLOCK)
    scheduler = Scheduler(BlockPool(12, groups), BLOCK, 64, max_sequences=4)
    reservation = scheduler.reserve(request(1, tokens=40))
    assert reservation is not None
    assert (len(reservation.blocks), reservation.cached_tokens) == (2, 0)
    scheduler.abort(1, landed_blocks=2)
    again = scheduler.reserve(request(2, tokens=40))
    assert again is not None
    assert (again.cached_blocks, again.cached_tokens) == (1, 36)


@pytest.mark.parametrize("groups", [ONE_GROUP, GROUPS, BlockGroups(2, 1, 8, BLOCK)], ids=str)
def test_a_reader_that_asks_by_names_asks_for_columns(groups: BlockGroups) -> None:
    for columns in range(12):
        hashes = names(columns * BLOCK)
        assert tuple(groups.chain_of([link.name for link in groups.links(hashes)])) == hashes
    assert tuple(GROUPS.chain_of(names(BLOCK))) == (), "a column has three blocks"


def test_a_fetch_without_room_takes_nothing() -> None:
    pool = BlockPool(9, GROUPS)
    with pytest.raises(OutOfBlocks):
        NamedBlocks(pool, GROUPS.links(names(24)), GROUPS.windowed_links(6))
    assert pool.counts.free == 9


def test_a_fetch_reuses_all_or_nothing_of_a_prompt_with_windows(scheduler: Scheduler) -> None:
    batch = scheduler.batch
    for landed, columns in ((9, 0), (10, 6)):
        incoming = batch.begin_fetch(names(24), lambda lacking: lacking == 6)
        assert incoming is not None
        assert incoming.new_columns(landed) == columns
        batch.end_fetch(incoming, landed)
    assert scheduler.pool.known_columns(names(24)) == 6
    assert batch.begin_fetch(names(24), lambda lacking: True) is None


def test_a_charge_is_without_what_windows_have_passed() -> None:
    assert charged_blocks(1000, 40, 1, BLOCK) == 260
    assert charged_blocks(1000, 40, 1, BLOCK, GROUPS) == 260 + 2 * 2
    assert charged_blocks(1000, 40, 3, BLOCK, GROUPS) == 250 + 3 * (10 + 2 * 2)


def test_layers_are_dealt_into_few_groups_of_equally_many(config_of: ConfigOf) -> None:
    gemma = config_of([512, 512, 512, 512, 512, None] * 4 + [512, 512], 32_768)
    dealt = layer_groups(gemma, 32)
    assert dealt.groups == BlockGroups(1, 6, 512, 32)
    assert dealt.layers == 4
    assert len(set(dealt.places)) == 26
    assert [place.group for place in dealt.places[:6]] == [1, 1, 1, 1, 2, 0]
    assert [place.place for place in dealt.places[:6]] == [0, 1, 2, 3, 0, 0]


@pytest.mark.parametrize(
    ("windows", "positions"),
    [([None] * 4, 4096), ([128, None] * 2, 255), ([128] * 4, 255), ([128, 64, None, None], 4096)],
    ids=["without windows", "hardly longer than a window", "no longer than two windows", "of two sizes"],
)
def test_other_models_have_one_group(windows: list[int | None], positions: int, config_of: ConfigOf) -> None:
    dealt = layer_groups(config_of(windows, positions), 32)
    assert dealt.groups == ONE_GROUP
    assert dealt.layers == len(windows)


def test_layers_that_all_have_a_window_are_one_group_that_keeps_the_window(config_of: ConfigOf) -> None:
    dealt = layer_groups(config_of([128] * 4, 4096), 32)
    assert dealt.groups == BlockGroups(0, 1, 128, 32)
    assert (dealt.layers, [place.place for place in dealt.places]) == (4, [0, 1, 2, 3])


def test_pool_of_a_window_serves_any_context_if_all_layers_have_it(config_of: ConfigOf) -> None:
    layout = kv_layout(config_of([128] * 4, 4096), torch.bfloat16, 32)
    assert size_pool(layout, 4096, 6 * layout.block_bytes, None) == (6, 4096)
    assert size_pool(layout, 4096, 5 * layout.block_bytes, None) == (5, 5 * 32)
    assert KvSizing.of(layout, 14 * layout.block_bytes, 4096).concurrency == 1 + 8 / 4


def test_more_requests_fit_at_once_for_their_windows(config_of: ConfigOf) -> None:
    def sizing(windows: list[int | None], kv_memory_bytes: int) -> KvSizing:
        layout = kv_layout(config_of(windows, 4096), torch.bfloat16, 32)
        return KvSizing.of(layout, kv_memory_bytes, max_model_len=4096)

    plain, windowed = sizing([None] * 4, 1 << 27), sizing([128, None] * 2, 1 << 27)
    assert plain.token_bytes == windowed.token_bytes
    assert windowed.block_bytes == plain.block_bytes // 2
    assert windowed.request_blocks == 128 + 4 + 2
    assert windowed.answer_blocks == 128 + 4
    assert windowed.concurrency > 1.5 * plain.concurrency
    assert sizing([128, None] * 2, windowed.bytes_for(5)).concurrency == pytest.approx(5)


@pytest.mark.parametrize(("blocks", "columns"), [(11, 5), (12, 6), (25, 19), (134, 128)])
def test_pool_is_sized_for_a_prompt_whose_windows_release_blocks(
    blocks: int, columns: int, config_of: ConfigOf
) -> None:
    layout = kv_layout(config_of([128, None] * 2, 4096), torch.bfloat16, 32)
    assert size_pool(layout, 4096, blocks * layout.block_bytes, None) == (blocks, columns * 32)
    needed = layout.groups.most_blocks(columns)
    assert needed <= blocks < layout.groups.most_blocks(columns + 1) or columns == 128


def test_pools_with_other_groups_do_not_pair(config_of: ConfigOf) -> None:
    described = {
        kv_layout(config_of(windows, 4096), torch.bfloat16, 32).describe()
        for windows in ([None] * 4, [128, None] * 2, [64, None] * 2, [128, None, None, None])
    }
    assert len(described) == 4


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt_oss", "mistral"])
def test_without_native_kernels_answers_are_those_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine without a compiler."""
    folder = make_checkpoint(tmp_path / family, family, seed=1)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    monkeypatch.setattr(attention, "attends", lambda query, kv: False)
    paged = PagedModel(folder, BLOCK)
    assert paged.layout.groups.windowed
    prompts = [random_prompt(75), random_prompt(33)]
    for prompt, answer in zip(prompts, paged.greedy(prompts, steps=10, chunk_tokens=30), strict=True):
        assert unlikely(expected, prompt, answer) == []


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_context_longer_than_the_pool_is_answered_as_by_transformers(
    family: str, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path / family, family, seed=1)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if not native:
        monkeypatch.setattr(attention, "attends", lambda query, kv: False)
    paged = PagedModel(folder, BLOCK, packed=native)
    groups = paged.layout.groups
    pool = BlockPool(groups.most_blocks(50), groups)
    assert pool.total_blocks < 0.8 * groups.blocks(50)
    scheduler = Scheduler(pool, BLOCK, max_step_tokens=30, max_sequences=2)
    prompt = random_prompt(180)
    asked = Request(1, tuple(prompt), SamplingParams(max_tokens=20), ())
    answer = token_ids(answered(paged.runner, scheduler, [asked]))[1, 0]
    assert unlikely(expected, prompt, answer) == []
