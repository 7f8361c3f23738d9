"""What is computed before the first request: every tile of a prompt's attention, contexts whole and in parts."""

from baton.engine.models.batch import make_batch
from baton.engine.runner.runner import warm_up_plans
from baton.kernels.triton.attention_tile import context_splits
from baton.kernels.triton.launch import Device, decode_tile, prefill_tile
from tests.fixtures.paged import CPU

HOPPER = Device(90, 132)


def test_kernels_with_constant_sizes_are_warmed_up_at_all_of_them() -> None:
    group, kv_heads, block_tokens = 4, 8, 32
    plans = warm_up_plans(block_tokens, 1 << 17, compiles=True)
    chunks = [chunk for plan in plans for chunk in plan.chunks]
    prompts = {len(chunk.token_ids) for chunk in chunks if len(chunk.token_ids) > 1}
    tiles = {prefill_tile(HOPPER, 128, 2, tokens * group, quantised=False).rows for tokens in prompts}
    assert tiles == {prefill_tile(HOPPER, 128, 2, tokens * group, quantised=False).rows for tokens in range(2, 5000)}
    tile = decode_tile(HOPPER, 128, 2, group)
    contexts = [len(chunk.block_table) * block_tokens for chunk in chunks if len(chunk.token_ids) == 1]

    def parts(tokens: int) -> int:
        return context_splits(kv_heads, -(-tokens // tile.tokens), HOPPER.multiprocessors, tile.filling)

    assert min(map(parts, contexts)) == 1 < max(map(parts, contexts))


def test_all_of_it_stays_in_block_0_and_within_the_positions_of_the_model() -> None:
    for block_tokens in (1, 16):
        plans = list(warm_up_plans(block_tokens, 64, compiles=True))
        for plan in plans:
            if plan.chunks:
                make_batch(plan.chunks, block_tokens, CPU)
        assert all(set(chunk.block_table) == {0} and chunk.end <= 64 for plan in plans for chunk in plan.chunks)


def test_cpu_compiles_nothing_and_computes_two_steps() -> None:
    assert len(list(warm_up_plans(16, 1000, compiles=False))) == 2
