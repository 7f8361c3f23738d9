"""`baton bench attention`: what it counts, that both sides compute the same, and a run of a second."""

import json

import pytest
import torch

from baton.engine.kv_cache.layout import KV_DTYPES
from baton.lab.benchmarks.engine.attention import AttentionBenchOptions, Case, HeadShape, cases_of, run_attention_bench

SHAPE = HeadShape(6, 2, 32)
# Of what is rounded to so many bits behind the first one: 23, 7, 7 of the largest in a head, 3 and 2.
BOUNDS = {"float32": 1e-5, "bfloat16": 0.01, "int8": 0.02, "fp8_e4m3": 0.05, "fp8_e5m2": 0.1}


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("batch", "context", "tokens"), [(3, 40, 1), (1, 40, 40), (2, 70, 33)])
def test_both_sides_compute_the_same(
    monkeypatch: pytest.MonkeyPatch, kv_dtype: str, batch: int, context: int, tokens: int
) -> None:
    monkeypatch.setattr("baton.lab.benchmarks.engine.attention.COLD_BYTES", 0)
    torch.manual_seed(0)
    rounds = Case(SHAPE, kv_dtype, batch, context, tokens).make()
    ours, torchs = rounds.ours()(), rounds.torchs()()
    assert isinstance(ours, list) and isinstance(torchs, list)
    found = torch.stack(ours).float().view(-1, batch, tokens, 6, 32)
    expected = torch.stack(torchs).float().transpose(2, 3)
    assert (found[0] - expected[0]).norm() < BOUNDS[kv_dtype] * expected[0].norm()


def test_what_is_read_and_computed_is_counted() -> None:
    decode, chunk = Case(SHAPE, "int8", 3, 40, 1), Case(SHAPE, "float32", 1, 40, 10)
    assert decode.kv_bytes == 3 * 40 * 2 * 2 * (32 + 4)
    assert decode.flop == 3 * 40 * 4 * 6 * 32
    assert chunk.flop == sum(range(31, 41)) * 4 * 6 * 32


def test_decode_has_every_batch_and_prefill_one_sequence() -> None:
    options = AttentionBenchOptions((SHAPE,), ("float32",), (1, 16), (64, 512), chunk_tokens=128, threads=1)
    sizes = [(case.batch, case.context, case.tokens) for case in cases_of(options)]
    assert sizes == [(1, 64, 1), (1, 512, 1), (16, 64, 1), (16, 512, 1), (1, 64, 64), (1, 512, 128)]


def test_a_run_prints_a_list_of_objects(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.lab.benchmarks.report.limits.READ_BYTES", 1 << 20)
    monkeypatch.setattr("baton.lab.benchmarks.engine.attention.COLD_BYTES", 1 << 20)
    options = AttentionBenchOptions((SHAPE,), ("int8",), (2,), (64,), 32, torch.get_num_threads())
    assert run_attention_bench(options, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["phase"] for each in told] == ["decode", "prefill"]
    assert all(each["gb_per_s"] > 0 and each["times_torch"] > 0 for each in told)
