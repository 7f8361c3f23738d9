"""The native attention kernels against the reference, at every level of the instruction set that this machine has."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from baton.kernels import reference
from baton.kernels.native.library import NativeLibrary, attends
from baton.kernels.native.structs import MOST_PIECES, PIECE_TOKENS
from baton.kernels.types import QUANTISED, DecodeRows, KvLayer, Scoring

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
TRIALS = 40


class Case:
    """A random shape, of which every fourth has values that are the beginnings of keys. Blocks that no one owns, and
    every token past the context, hold NaN."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.kv_heads, self.group = draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 4, 7])
        self.head_dim, self.value_prefix = draw.choice([16, 32, 48, 64, 80, 128, 256]), None
        if seed % 4 == 3:
            self.head_dim, self.value_prefix = draw.choice([(48, 16), (96, 32), (112, 80), (576, 512)])
        self.block_tokens = draw.choice([1, 8, 16, 17, 32, 64])
        self.dtype = draw.choice([torch.float32, torch.bfloat16, *LARGEST])
        sinks = draw.choice([None, torch.randn(self.heads) * 3])
        window, softcap = draw.choice([None, None, 1, 5, 33]), draw.choice([None, 20.0])
        self.scoring = Scoring(self.head_dim**-0.5, window, softcap, sinks)

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def tolerance(self) -> float:
        return 2e-2 if self.dtype == torch.bfloat16 else 2e-5

    def query(self, tokens: int) -> torch.Tensor:
        dtype = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        return torch.randn(tokens, self.heads, self.head_dim, dtype=dtype)

    def sequences(self, contexts: list[int]) -> tuple[KvLayer, torch.Tensor, torch.Tensor]:
        """The pool, the block ids of all sequences one after another, and where each one's begin."""
        used = [-(-tokens // self.block_tokens) for tokens in contexts]
        blocks = sum(used) + 3
        ids = torch.randperm(blocks)[: sum(used)]
        starts = torch.tensor([0, *itertools.accumulate(used)])
        kinds = 2 if self.value_prefix is None else 1
        values = torch.full((blocks, kinds, self.kv_heads, self.block_tokens, self.head_dim), torch.nan)
        for tokens, begin in zip(contexts, starts.tolist(), strict=False):
            positions = torch.arange(tokens)
            places = ids[begin + positions // self.block_tokens], positions % self.block_tokens
            numbers = torch.randn(tokens, kinds, self.kv_heads, self.head_dim)
            values.transpose(1, 3)[places] = numbers.transpose(1, 2)  # [blocks, token of it, kv_heads, kinds, head_dim]
        if self.dtype not in QUANTISED:
            return KvLayer(values.to(self.dtype), None, self.value_prefix), ids, starts
        scales = values.abs().amax(-1) / LARGEST[self.dtype]
        stored = (values / scales[..., None]).nan_to_num(0.0)
        stored = stored.round() if self.dtype == torch.int8 else stored
        return KvLayer(stored.to(self.dtype), scales, self.value_prefix), ids, starts

    def first_blocks(self, ids: torch.Tensor, tokens: int) -> torch.Tensor:
        return ids[: -(-tokens // self.block_tokens)]

    def each_as_a_sequence(self, ids: torch.Tensor, positions: range) -> DecodeRows:
        """Every position of one context, as if each were the last of a sequence of its own."""
        tables = [self.first_blocks(ids, position + 1) for position in positions]
        starts = torch.tensor([0, *itertools.accumulate(map(len, tables))])
        return DecodeRows(torch.cat(tables), starts, torch.tensor([position + 1 for position in positions]))


@pytest.mark.parametrize("seed", range(TRIALS))
def test_prefill_equals_the_reference(native: NativeLibrary, seed: int) -> None:
    case = Case(seed)
    start = case.draw.choice([0, 1, 31, 32, 40, 100])
    query = case.query(case.draw.choice([1, 2, 5, 31, 32, 33, 70]))
    kv, ids, _ = case.sequences([start + len(query)])
    computed = native.paged_prefill(query, kv, ids, start, case.scoring)
    expected = reference.paged_prefill(query, _without_poison(kv), ids, start, case.scoring)
    torch.testing.assert_close(computed, expected, rtol=case.tolerance, atol=case.tolerance)


@pytest.mark.parametrize("seed", range(TRIALS))
def test_decode_equals_the_reference(native: NativeLibrary, seed: int) -> None:
    case = Case(seed)
    contexts = [case.draw.choice([1, 2, 31, 32, 33, 100, 200]) for _ in range(case.draw.choice([1, 2, 5]))]
    query = case.query(len(contexts))
    kv, ids, starts = case.sequences(contexts)
    tokens = torch.tensor(contexts)
    computed = native.paged_decode(query, kv, DecodeRows(ids, starts, tokens), case.scoring)
    expected = reference.paged_decode(query, _without_poison(kv), DecodeRows(ids, starts, tokens), case.scoring)
    torch.testing.assert_close(computed, expected, rtol=case.tolerance, atol=case.tolerance)


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", [0, 1])
def test_nonfinite_values_stay_visible(native: NativeLibrary, kind: int, spoilt: float) -> None:
    data = torch.randn(2, 2, 1, 32, 16)
    data[1, kind, 0, 3] = spoilt
    kv, ids, scoring = KvLayer(data, None), torch.tensor([0, 1]), Scoring(0.25)
    query = torch.ones(1, 1, 16)
    prefilled = native.paged_prefill(query, kv, ids, 40, scoring)
    decoded = native.paged_decode(query, kv, DecodeRows(ids, torch.tensor([0, 2]), torch.tensor([41])), scoring)
    assert not prefilled.isfinite().all()
    assert not decoded.isfinite().all()


@pytest.mark.parametrize("seed", range(24))
def test_row_is_the_same_to_the_last_bit_in_any_chunk_and_in_decode(native: NativeLibrary, seed: int) -> None:
    case = Case(seed)
    total = case.draw.choice([3, 40, 64, 65, 130, 257, 600])
    scoring = case.scoring
    if total > PIECE_TOKENS:
        scoring = replace(scoring, window=case.draw.choice([None, 100, 300]))
    kv, ids, _ = case.sequences([total])
    query = case.query(total)
    whole = native.paged_prefill(query, kv, ids, 0, scoring)
    chunks, start = [], 0
    while start < total:
        end = min(total, start + case.draw.choice([1, 2, 5, 16, 33, 64, 100]))
        chunks.append(native.paged_prefill(query[start:end], kv, case.first_blocks(ids, end), start, scoring))
        start = end
    assert torch.equal(torch.cat(chunks), whole)
    assert torch.equal(native.paged_decode(query, kv, case.each_as_a_sequence(ids, range(total)), scoring), whole)


@pytest.mark.parametrize("window", [None, 4000])
def test_split_contexts_equal_unsplit_rows(native: NativeLibrary, window: int | None) -> None:
    case = Case(0)
    case.kv_heads, case.group, case.head_dim, case.block_tokens, case.dtype = 1, 3, 16, 64, torch.float32
    total, start = MOST_PIECES * PIECE_TOKENS + 40, MOST_PIECES * PIECE_TOKENS - 40
    kv, ids, _ = case.sequences([total])
    query, scoring = case.query(total - start), Scoring(0.25, window)
    prefilled = native.paged_prefill(query, kv, ids, start, scoring)
    rows = case.each_as_a_sequence(ids, range(start, total))
    assert torch.equal(native.paged_decode(query, kv, rows, scoring), prefilled)
    expected = reference.paged_prefill(query, kv, ids, start, scoring)
    torch.testing.assert_close(prefilled, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("seed", range(4))
def test_splitting_a_long_context_over_threads_changes_nothing(native: NativeLibrary, seed: int) -> None:
    case = Case(seed)
    query, scoring = case.query(1), Scoring(case.head_dim**-0.5)  # all of a context, which is several pieces
    kv, ids, starts = case.sequences([700])
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(native.paged_decode(query, kv, DecodeRows(ids, starts, torch.tensor([700])), scoring))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_heads_in_groups_that_share_one_key_are_the_same_to_the_last_bit(native: NativeLibrary) -> None:
    case = Case(3)
    case.kv_heads, case.group, case.dtype = 1, 6, torch.float32
    kv, ids, starts = case.sequences([300])
    query, scoring = case.query(300), Scoring(0.1)
    decode = DecodeRows(ids, starts, torch.tensor([300]))
    for each in (kv.shared_by(2), kv.shared_by(6)):
        assert torch.equal(
            native.paged_prefill(query, each, ids, 0, scoring), native.paged_prefill(query, kv, ids, 0, scoring)
        )
        assert torch.equal(
            native.paged_decode(query[-1:], each, decode, scoring), native.paged_decode(query[-1:], kv, decode, scoring)
        )


def test_shapes_without_whole_vectors_are_the_references(native: NativeLibrary) -> None:
    kv = KvLayer(torch.zeros(1, 2, 1, 8, 24), None)
    assert not attends(torch.zeros(1, 1, 24), kv)


def _without_poison(kv: KvLayer) -> KvLayer:
    """The reference gathers whole blocks and may multiply what lies past a context by zero."""
    return KvLayer(kv.data if kv.scales is not None else kv.data.nan_to_num(0.0), _clean(kv.scales), kv.value_prefix)


def _clean(scales: torch.Tensor | None) -> torch.Tensor | None:
    return None if scales is None else scales.nan_to_num(0.0)
