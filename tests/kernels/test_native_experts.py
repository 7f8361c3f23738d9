"""Layers of experts by the native kernels against the reference: every way to choose, every way to keep weights."""

from dataclasses import replace

import pytest
import torch

from baton.kernels import reference
from baton.kernels.experts import choose_experts, packed_experts
from baton.kernels.native.library import NativeLibrary
from baton.kernels.packed_weight import (
    GROUPED,
    PackedExperts,
    PackedGated,
    PackedWeight,
    Stored,
    pack,
    pack_codes,
    pack_int4,
    pack_int8,
)
from baton.kernels.types import Gate, GatingFunction, Routing

HIDDEN, INNER, EXPERTS = 48, 40, 12
ROUTINGS = {
    "two of twelve": Routing(2, normalised=True),
    "as they are": Routing(3, normalised=False),
    "sigmoids": Routing(3, normalised=True, odds=GatingFunction.SIGMOID, scale=2.5),
    "best groups": Routing(3, normalised=True, odds=GatingFunction.SIGMOID, groups=4, kept_groups=2, judged_by=2),
    "groups by their best": Routing(4, normalised=False, groups=3, kept_groups=2, scale=1.5),
    "all": Routing(EXPERTS, normalised=True),
}


def weight_of(stored: Stored, outputs: int, inputs: int) -> PackedWeight:
    if stored is Stored.INT8:
        return pack_int8(torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8), torch.rand(outputs) / 500, None)
    if stored in (Stored.CODE4, Stored.CODE8):
        codes, groups = torch.randint(0, 16, (outputs, inputs)), (outputs, inputs // 8)
        kind = torch.uint8 if stored is Stored.CODE4 else torch.int8
        return pack_codes(codes.to(kind), (torch.rand(groups) / 30).half(), (torch.rand(groups) / -4).half(), None)
    if stored in GROUPED:
        groups = (outputs, inputs // 8)
        codes, zeros = torch.randint(0, 16, (outputs, inputs)).byte(), torch.randint(48, 80, groups).byte()
        return pack_int4(codes, (torch.rand(groups) / 30 + 0.01).half(), zeros, None)
    return pack(torch.randn(outputs, inputs) / inputs**0.5, stored, torch.randn(outputs) / 10)


def gated(stored: Stored, inner: int = INNER, gate: Gate = Gate.SILU) -> PackedGated:
    return PackedGated(weight_of(stored, 2 * inner, HIDDEN), weight_of(stored, HIDDEN, inner), gate)


def mixture(routing: Routing, stored: Stored = Stored.FLOAT32, gate: Gate = Gate.SILU) -> PackedExperts:
    return PackedExperts(
        router=pack(torch.randn(EXPERTS, HIDDEN) / 4, Stored.FLOAT32, None),
        routing=routing,
        correction=torch.randn(EXPERTS) / 10 if routing.odds is GatingFunction.SIGMOID else None,
        experts=tuple(gated(stored, gate=gate) for _ in range(EXPERTS)),
        shared=None,
        shared_gate=None,
    )


def check(native: NativeLibrary, asked: PackedExperts, rows: int) -> None:
    x = torch.randn(rows, HIDDEN)
    expected = reference.packed_experts(x, asked)
    tolerance = 5e-5 * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(native.packed_experts(x, asked), expected, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("rows", [1, 3, 50])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_layers_equal_the_reference_however_experts_are_chosen(native: NativeLibrary, routing: str, rows: int) -> None:
    check(native, mixture(ROUTINGS[routing]), rows)


@pytest.mark.parametrize("stored", [stored for stored in Stored if stored is not Stored.FP4])
def test_layers_equal_the_reference_however_weights_are_kept(native: NativeLibrary, stored: Stored) -> None:
    check(native, mixture(ROUTINGS["two of twelve"], stored, Gate.CLAMPED), 20)


@pytest.mark.parametrize("opened", [False, True])
def test_every_row_takes_the_shared_expert(native: NativeLibrary, opened: bool) -> None:
    gate = pack(torch.randn(1, HIDDEN), Stored.FLOAT32, None) if opened else None
    plain = mixture(ROUTINGS["sigmoids"])
    shared = replace(plain, shared=gated(Stored.FLOAT32, inner=56), shared_gate=gate)
    check(native, shared, 9)
    x = torch.randn(9, HIDDEN)
    assert (native.packed_experts(x, shared) != native.packed_experts(x, plain)).any(1).all()


@pytest.mark.parametrize("routing", ROUTINGS)
def test_row_does_not_depend_on_its_neighbours_or_on_threads(native: NativeLibrary, routing: str) -> None:
    asked, x = mixture(ROUTINGS[routing], Stored.ROUNDING), torch.randn(40, HIDDEN)
    whole = native.packed_experts(x, asked)
    for rows in (1, 2, 7, 33):
        assert torch.equal(native.packed_experts(x[:rows], asked), whole[:rows])
    torch.set_num_threads(3)
    assert torch.equal(native.packed_experts(x, asked), whole)


def test_nonfinite_row_spoils_no_other(native: NativeLibrary) -> None:
    asked, x = mixture(ROUTINGS["best groups"]), torch.randn(5, HIDDEN)
    clean = native.packed_experts(x, asked)
    x[2, 7] = torch.nan
    spoilt = native.packed_experts(x, asked)
    assert spoilt[2].isnan().all()
    kept = [0, 1, 3, 4]
    assert torch.equal(spoilt[kept], clean[kept])


def test_weights_of_experts_that_no_row_takes_are_not_read(native: NativeLibrary) -> None:
    asked, x = mixture(ROUTINGS["two of twelve"]), torch.randn(3, HIDDEN)
    numbers = reference.packed_linear(x, asked.router)
    taken = set(choose_experts(numbers, asked.routing, None).chosen.flatten().tolist())
    clean = native.packed_experts(x, asked)
    for index, expert in enumerate(asked.experts):
        if index not in taken:
            expert.gate_up.data.fill_(torch.nan)
            expert.down.data.fill_(torch.nan)
    assert torch.equal(native.packed_experts(x, asked), clean)


def test_first_of_equal_experts_are_chosen(native: NativeLibrary) -> None:
    asked, x = mixture(Routing(2, normalised=True)), torch.randn(1, HIDDEN)
    asked.router.data.zero_()
    first = replace(asked, experts=asked.experts[:2], router=pack(torch.zeros(2, HIDDEN), Stored.FLOAT32, None))
    assert torch.equal(native.packed_experts(x, asked), native.packed_experts(x, first))


def test_rows_of_another_size_are_refused() -> None:
    asked = mixture(Routing(2, normalised=True))
    with pytest.raises(ValueError, match=r"x must be \[any, 48\], got \[2, 47\]"):
        packed_experts(torch.zeros(2, 47), asked)
    with pytest.raises(ValueError, match=r"correction must be \[12\], got \[11\]"):
        choose_experts(torch.zeros(2, 12), asked.routing, torch.zeros(11))
    assert packed_experts(torch.zeros(0, HIDDEN), asked).shape == (0, HIDDEN)
