"""What is computed before the first request: every tile of a prompt's attention, every split of a context."""

from baton.engine.models.batch import make_batch
from baton.engine.runner.runner import warm_up_plans
from baton.kernels.triton.attention_tile import decode_splits
from baton.kernels.triton.call import power_of_two
from baton.kernels.triton.launch import Device, decode_tile, prefill_tile
from tests.fixtures.paged import CPU

HOPPER = Device(90, 132)


def test_kernels_that_take_sizes_as_constants_meet_all_of_them() -> None:
    group, kv_heads, block_tokens = 4, 8, 32
    chunks = [plan.chunks[0] for plan in warm_up_plans(block_tokens, 1 << 20, compiles=True)]
    prompts = {len(chunk.token_ids) for chunk in chunks if len(chunk.token_ids) > 1}
    tiles = {prefill_tile(HOPPER, 128, 2, tokens * group).rows for tokens in prompts}
    assert tiles == {prefill_tile(HOPPER, 128, 2, tokens * group).rows for tokens in range(2, 5000)}
    tile = decode_tile(HOPPER, 128, 2, group)
    contexts = [len(chunk.block_table) * block_tokens for chunk in chunks if len(chunk.token_ids) == 1]

    def parts(tokens: int) -> int:
        return power_of_two(decode_splits(kv_heads, -(-tokens // tile.tokens), HOPPER.multiprocessors, tile.filling))

    missed = {parts(tokens) for tokens in range(1, 8192)} - set(map(parts, contexts))
    assert missed <= {64}  # a few lengths alone take that many


def test_all_of_it_stays_in_block_0_and_within_the_positions_of_the_model() -> None:
    for block_tokens in (1, 16):
        plans = list(warm_up_plans(block_tokens, 64, compiles=True))
        for plan in plans:
            make_batch(plan.chunks, block_tokens, CPU)
        assert all(set(chunk.block_table) == {0} and chunk.end <= 64 for plan in plans for chunk in plan.chunks)


def test_a_cpu_compiles_nothing_and_computes_two_steps() -> None:
    assert len(list(warm_up_plans(16, 1000, compiles=False))) == 2
