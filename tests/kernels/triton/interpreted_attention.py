"""Paged attention in Triton against dense attention in float64."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from baton.kernels import attention
from baton.kernels.dispatch import on_the_interpreter
from baton.kernels.libraries.gathered import gathered_prefill
from baton.kernels.triton.launch import INTERPRETED, Device, Tile
from baton.kernels.triton.paged_decode import combine_call, decode_call
from baton.kernels.triton.paged_prefill import paged_prefill, prefill_calls
from baton.kernels.triton.pages import Turning, rotate_call
from baton.kernels.types import QUANTISED, DecodeRows, HeadNorms, PrefillChunks, PrefillRows, Scoring
from tests.kernels.triton.paged_pool import POISON, PagedPool, dense_attention

SCALE = 0.2
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)]
DTYPES += [(stored, torch.bfloat16) for stored in QUANTISED] + [(torch.float8_e4m3fn, torch.float32)]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.02, torch.float16: 0.003}
SINKS = torch.tensor([-2.0, 0.0, 2.0, 300.0, -300.0, 1.0])
SCORINGS = {
    "window": Scoring(SCALE, window=7),
    "wide window": Scoring(SCALE, window=70),
    "softcap": Scoring(SCALE, softcap=0.5),
    "sinks": Scoring(SCALE, sinks=SINKS),
    "all": Scoring(SCALE, 9, 2.0, SINKS),
}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy meets the poison


def check_decode(
    pool: PagedPool, query: torch.Tensor, contexts: Sequence[int], scoring: Scoring, splits: int | None = None
) -> None:
    stored = [pool.store(context) for context in contexts]
    starts = torch.tensor([0] + [len(blocks) for blocks, _, _ in stored]).cumsum(0)
    ids = torch.tensor([block for blocks, _, _ in stored for block in blocks])
    output = torch.full_like(query[..., : pool.layer.value_dim], torch.nan).contiguous()
    layer = pool.layer.shared_by(2) if pool.layer.kv_heads == 1 else pool.layer
    call = decode_call(
        query, layer, DecodeRows(ids, starts, torch.tensor(contexts)), scoring, output, INTERPRETED, splits
    )
    for name in ("parts", "highest", "total"):
        if (poisoned := call.arguments[name]) is not None:
            poisoned.fill_(torch.nan)
    call.start()
    for row, (context, (_, key, value)) in enumerate(zip(contexts, stored, strict=True)):
        expected = dense_attention(query[row : row + 1], key, value, context - 1, scoring)
        torch.testing.assert_close(output[row : row + 1].double(), expected, atol=TOLERANCE[query.dtype], rtol=0.01)


@pytest.mark.parametrize(("stored", "computed"), DTYPES)
def test_decode_reads_every_format(stored: torch.dtype, computed: torch.dtype) -> None:
    pool = PagedPool(stored, 2, 8, 24)
    check_decode(pool, torch.randn(2, 6, 24).to(computed), [67, 8], Scoring(SCALE), 1)


# Of a key 16 numbers are its value, and 8 are not; or 24 and 12.
@pytest.mark.parametrize(
    ("stored", "computed", "prefix", "size"),
    [*((*dtypes, 16, 24) for dtypes in DTYPES), (torch.bfloat16, torch.bfloat16, 24, 36)],
)
def test_values_may_be_the_beginnings_of_keys(
    stored: torch.dtype, computed: torch.dtype, prefix: int, size: int
) -> None:
    scoring = SCORINGS["wide window"]
    decoding = PagedPool(stored, 1, 8, size, value_prefix=prefix)
    check_decode(decoding, torch.randn(2, 6, size).to(computed), [67, 8], scoring, 3)
    pool = PagedPool(stored, 1, 8, size, value_prefix=prefix)
    blocks, key, value = pool.store(75)
    query = torch.randn(12, 6, size).to(computed)
    result = paged_prefill(query, pool.layer.shared_by(3), torch.tensor(blocks), 63, scoring)
    expected = dense_attention(query, key, value, 63, scoring)
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCE[computed], rtol=0.01)


@pytest.mark.parametrize(
    ("name", "splits"), [("window", 2), ("wide window", 5), ("softcap", 3), ("sinks", 3), ("all", 1)]
)
def test_decode_scores_equal_in_any_number_of_parts(name: str, splits: int) -> None:
    pool = PagedPool(torch.float32, 2, 5, 16)
    check_decode(pool, torch.randn(2, 6, 16), [1, 83], SCORINGS[name], splits)


def test_keys_before_a_window_do_not_affect_the_result() -> None:
    """A tile may begin in blocks that the window has passed: their columns have blocks of others."""
    pool, scoring = PagedPool(torch.float32, 2, 8, 16), SCORINGS["window"]
    blocks, key, value = pool.store(29)  # the last token sees from 22 on, in the third block
    pool.layer.data[blocks[:2]] = torch.nan
    ids, query = torch.tensor(blocks), torch.randn(1, 6, 16)
    decoded = torch.full_like(query, torch.nan)
    rows = DecodeRows(ids, torch.tensor([0, len(blocks)]), torch.tensor([29]))
    decode_call(query, pool.layer, rows, scoring, decoded, INTERPRETED, 1, Tile(16, 32, 4, 2)).start()
    prefilled = torch.full_like(query, torch.nan)
    prefills = PrefillChunks.one(1, 28, ids)
    prefill_calls(query, pool.layer, prefills, scoring, prefilled, INTERPRETED, 1, Tile(16, 32, 4, 2))[0].start()
    expected = dense_attention(query, key, value, 28, scoring)
    for found in (decoded, prefilled):
        torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[torch.float32], rtol=0.01)


@pytest.mark.parametrize("heads", [6, 16])  # of a KV head 3, padded, and 8 in several passes
def test_part_that_ends_last_combines_all_in_their_order(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is, launch after launch, with the numbers that a kernel of its own makes of the same parts."""
    pool = PagedPool(torch.float32, 2, 5, 16, blocks=60)
    query, made = torch.randn(3, heads, 16), [pool.store(context) for context in (170, 20)]
    starts = torch.tensor([0, *(len(blocks) for blocks, _, _ in made), 0]).cumsum(0)
    ids = torch.tensor([block for blocks, _, _ in made for block in blocks])
    arrivals = torch.zeros(3 * 2, dtype=torch.int32)
    rows = DecodeRows(ids, starts, torch.tensor([170, 20, 0]), arrivals=arrivals)
    place, found = InterpreterBuilder.set_grid_idx, []
    orders = [lambda split: split, lambda split: 6 - split, lambda split: (split + 3) % 7]
    for order in orders:
        output = torch.full_like(query, torch.nan)
        call = decode_call(query, pool.layer, rows, Scoring(SCALE), output, INTERPRETED, splits=7)
        call.arguments["parts"].fill_(torch.nan)
        call.arguments["highest"][0] = -torch.inf  # of parts that are none, as that kernel expects it
        call.arguments["total"].zero_()
        with monkeypatch.context() as patched:
            patched.setattr(
                InterpreterBuilder, "set_grid_idx", lambda self, x, y, z, order=order: place(self, x, y, order(z))
            )
            call.start()
        found.append(output)
        assert not arrivals.any()
    alone = torch.full_like(query, torch.nan)
    parts, highest = call.arguments["parts"], call.arguments["highest"]
    combine_call(parts, highest, alone, call.arguments["BLOCK_DIM"]).start()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    torch.testing.assert_close(found[0], alone, atol=0, rtol=0)
    assert not alone[2].any()
    expected = dense_attention(query[:1], *made[0][1:], 169, Scoring(SCALE))
    torch.testing.assert_close(alone[:1].double(), expected, atol=2e-5, rtol=0.01)


@pytest.mark.parametrize(
    ("stored", "computed", "splits", "normed"),
    [*((*dtypes, 3, True) for dtypes in DTYPES), *((*dtypes, 1, False) for dtypes in DTYPES[::3])],
)
def test_rotated_decode_is_both_operations_in_one(
    stored: torch.dtype, computed: torch.dtype, splits: int, normed: bool
) -> None:
    """Of contexts of one token, of the first and of the last place of a block, and of a row of padding."""
    pools = [PagedPool(stored, 2, 8, 12, blocks=20) for _ in range(2)]
    contexts = [1, 17, 40, 0]
    tables = [pools[0].store(each)[0] if each else [] for each in contexts]
    pools[1].raw.copy_(pools[0].raw)
    slots = [
        table[-1] * 8 + (context - 1) % 8 if table else -1 for table, context in zip(tables, contexts, strict=True)
    ]
    for pool in pools:
        for slot in slots[:-1]:
            pool.layer.data.view(torch.uint8)[slot // 8, :, :, slot % 8] = POISON
    norms = HeadNorms(torch.randn(12).to(computed), torch.randn(12).to(computed), 1e-6) if normed else None
    angles, qkv = torch.randn(41, 6), torch.randn(4, 6 + 4, 12).to(computed)
    starts = torch.tensor([0, *map(len, tables)]).cumsum(0)
    rows = DecodeRows(torch.tensor([*itertools.chain(*tables)]), starts, torch.tensor(contexts))
    turning = Turning(
        angles.cos().to(computed), angles.sin().to(computed), torch.tensor([0, 16, 39, 0]), norms, torch.tensor(slots)
    )
    found, query = torch.full((4, 6, 12), torch.nan, dtype=computed), torch.empty(4, 6, 12, dtype=computed)
    decode_call(qkv, pools[0].layer, rows, Scoring(SCALE), found, INTERPRETED, splits, turning=turning).start()
    rotate_call(qkv, turning, pools[1].layer, query, INTERPRETED).start()
    expected = torch.full_like(found, torch.nan)
    decode_call(query, pools[1].layer, rows, Scoring(SCALE), expected, INTERPRETED, splits).start()
    assert torch.equal(pools[0].raw, pools[1].raw)
    assert torch.equal(found, expected)
    assert bool(found[:3].isfinite().all())


@pytest.mark.parametrize(("stored", "computed"), DTYPES)
def test_prefill_reads_every_format(stored: torch.dtype, computed: torch.dtype) -> None:
    pool = PagedPool(stored, 2, 8, 24)
    blocks, key, value = pool.store(75)
    query = torch.randn(70, 6, 24).to(computed)
    result = paged_prefill(query, pool.layer, torch.tensor(blocks), 5, Scoring(SCALE))
    expected = dense_attention(query, key, value, 5, Scoring(SCALE))
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCE[computed], rtol=0.01)


@pytest.mark.parametrize(
    ("name", "start", "tokens"),
    [("window", 0, 30), ("wide window", 33, 45), ("softcap", 64, 3), ("sinks", 20, 40), ("all", 11, 30)],
)
def test_prefill_scores_as_told(name: str, start: int, tokens: int) -> None:
    pool = PagedPool(torch.float32, 2, 5, 16)
    blocks, key, value = pool.store(start + tokens)
    query = torch.randn(tokens, 6, 16)
    result = paged_prefill(query, pool.layer, torch.tensor(blocks), start, SCORINGS[name])
    expected = dense_attention(query, key, value, start, SCORINGS[name])
    torch.testing.assert_close(result.double(), expected, atol=2e-5, rtol=0.01)


@pytest.mark.parametrize(
    ("name", "start", "tokens", "splits"),
    [
        ("plain", 90, 5, 3),
        ("plain", 90, 12, 7),  # more parts than some rows have tiles
        ("plain", 0, 20, 4),  # the first rows see nothing of the last parts
        ("window", 60, 12, 2),
        ("wide window", 60, 16, 5),
        ("softcap", 64, 3, 2),
        ("all", 40, 12, 4),
    ],
)
def test_prefill_is_the_same_in_any_number_of_parts(name: str, start: int, tokens: int, splits: int) -> None:
    pool, scoring = PagedPool(torch.float32, 2, 5, 16), SCORINGS.get(name, Scoring(SCALE))
    blocks, key, value = pool.store(start + tokens)
    query = torch.randn(tokens, 6, 16)
    output = torch.full_like(query, torch.nan)
    prefills = PrefillChunks.one(tokens, start, torch.tensor(blocks))
    attend, combine = prefill_calls(query, pool.layer, prefills, scoring, output, INTERPRETED, splits=splits)
    assert attend.grid[2] == splits
    for poisoned in ("output", "highest"):
        attend.arguments[poisoned].fill_(torch.nan)
    attend.start()
    combine.start()
    expected = dense_attention(query, key, value, start, scoring)
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=0.01)


def test_few_tokens_behind_a_long_prefix_are_split() -> None:
    pool, tokens, start = PagedPool(torch.bfloat16, 2, 8, 24, blocks=80), 3, 500
    blocks, key, value = pool.store(start + tokens)
    query = torch.randn(tokens, 6, 24).to(torch.bfloat16)
    hopper, few = Device(90, 132), PrefillChunks.one(tokens, start, torch.tensor(blocks))
    assert len(prefill_calls(query, pool.layer, few, Scoring(SCALE), torch.empty_like(query), hopper)) == 2
    whole = torch.empty(4096, 6, 24, dtype=torch.bfloat16)  # fills the device by itself
    many = PrefillChunks.one(len(whole), 0, torch.tensor(blocks))
    assert len(prefill_calls(whole, pool.layer, many, Scoring(SCALE), whole, hopper)) == 1
    result = paged_prefill(query, pool.layer, torch.tensor(blocks), start, Scoring(SCALE))
    expected = dense_attention(query, key, value, start, Scoring(SCALE))
    torch.testing.assert_close(result.double(), expected, atol=0.02, rtol=0.01)


Stored = list[tuple[torch.Tensor, torch.Tensor]]


def side_by_side(pool: PagedPool, asked: Sequence[tuple[int, int]]) -> tuple[PrefillChunks, Stored]:
    """Chunks by start and tokens, behind rows of answers and blocks of others; and the keys and values of each."""
    made = [pool.store(start + tokens) for start, tokens in asked]
    rows = [0, *itertools.accumulate(tokens for _, tokens in asked)]
    places = [2, *itertools.accumulate((len(blocks) for blocks, _, _ in made), initial=2)][1:]
    tables = [torch.tensor(blocks) for blocks, _, _ in made]
    prefills = PrefillChunks(
        tuple(
            PrefillRows(slice(7 + rows[index], 7 + rows[index + 1]), start, tables[index])
            for index, (start, _) in enumerate(asked)
        ),
        torch.tensor(rows),
        torch.tensor([start + tokens for start, tokens in asked]),
        torch.cat([torch.tensor([99, 98]), *tables]),
        torch.tensor(places),
    )
    return prefills, [(key, value) for _, key, value in made]


def check_chunks(
    output: torch.Tensor, query: torch.Tensor, prefills: PrefillChunks, stored: Stored, scoring: Scoring
) -> None:
    for each, (key, value) in zip(prefills.chunks, stored, strict=True):
        own = slice(each.rows.start - 7, each.rows.stop - 7)
        expected = dense_attention(query[own], key, value, each.start, scoring)
        torch.testing.assert_close(output[own].double(), expected, atol=2e-5, rtol=0.01)


@pytest.mark.parametrize(("name", "splits"), [("plain", 1), ("window", 1), ("all", 3)])
def test_chunks_of_a_step_are_one_launch_and_attend_as_each_alone(name: str, splits: int) -> None:
    """Of any lengths and starts, behind rows of answers and blocks of others."""
    pool, scoring = PagedPool(torch.float32, 2, 5, 16, blocks=90), SCORINGS.get(name, Scoring(SCALE))
    asked = [(40, 4), (0, 2), (70, 5), (0, 13), (3, 1), (0, 11), (9, 2)]  # start, tokens
    prefills, stored = side_by_side(pool, asked)
    query = torch.randn(sum(tokens for _, tokens in asked), 6, 16)
    output = torch.full_like(query, torch.nan)
    attend, *combine = prefill_calls(query, pool.layer, prefills, scoring, output, INTERPRETED, splits=splits)
    assert attend.grid[2] == splits
    for call in (attend, *combine):
        call.start()
    check_chunks(output, query, prefills, stored, scoring)


@pytest.mark.parametrize(("name", "gathered"), [("plain", 0), ("plain", 2), ("plain", 3), ("window", 2)])
def test_last_chunks_of_a_step_may_be_gathered_and_attend_as_in_place(
    name: str, gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, scoring = PagedPool(torch.float32, 2, 5, 16, blocks=90), SCORINGS.get(name, Scoring(SCALE))
    computed: list[int] = []

    def noted(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        computed.append(len(query))
        return gathered_prefill(query, *rest)

    monkeypatch.setattr(attention, "gathered_prefill", noted)
    prefills, stored = side_by_side(pool, [(40, 13), (0, 21), (70, 5)])
    query = torch.randn(39, 6, 16)
    output = torch.full_like(query, torch.nan)
    with on_the_interpreter():
        attention.paged_prefills(query, pool.layer, replace(prefills, by_library=gathered), scoring, output)
    check_chunks(output, query, prefills, stored, scoring)
    assert computed == ([] if name == "window" else [13, 21, 5][3 - gathered :])
