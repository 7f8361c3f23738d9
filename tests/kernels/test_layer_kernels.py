"""The element-wise kernels against formulas in float64 and against transformers, bit for bit where it matters."""

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from baton.kernels import reference
from baton.kernels.norms import gate_mul, rms_norm, rotary
from baton.kernels.pages import rotate_and_store
from baton.kernels.types import Gate, HeadNorms, KvLayer

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (5, 2, 33)])
def test_rms_norm_equals_transformers_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    module = LlamaRMSNorm(shape[-1], eps=1e-5).to(dtype)
    torch.nn.init.normal_(module.weight)
    x = torch.randn(shape).to(dtype)
    with torch.inference_mode():
        assert torch.equal(reference.rms_norm(x, module.weight, 1e-5), module(x))
        torch.testing.assert_close(rms_norm(x, module.weight, 1e-5), module(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 7])
def test_rotary_equals_transformers_bit_for_bit(tokens: int, dtype: torch.dtype) -> None:
    x = torch.randn(tokens, 3, 10).to(dtype)
    angles = torch.randn(tokens, 5)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    doubled = [torch.cat((half, half), -1)[None] for half in (cos, sin)]
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], *doubled)
    assert torch.equal(rotary(x, cos, sin), expected[0].transpose(0, 1))


def test_rotary_turns_a_pair_by_its_angle() -> None:
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])
    cos, sin = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    torch.testing.assert_close(rotary(x, cos, sin), torch.tensor([[[0.0, 0.0, 1.0, 2.0]]]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 63)])
def test_gate_mul_gates_the_second_half(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate, up = torch.randn(2, *shape).to(dtype)
    result = gate_mul(torch.cat((gate, up), dim=1))
    assert result.dtype == dtype
    expected = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    tolerance = 1e-6 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_is_that_of_transformers(dtype: torch.dtype) -> None:
    gate, up = (3 * torch.randn(2, 5, 63)).to(dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 0.03
    expected = ACT2FN["gelu_pytorch_tanh"](gate) * up
    made = gate_mul(torch.cat((gate, up), dim=1), Gate.GELU)
    torch.testing.assert_close(made, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_clamped_gates_equal_transformers_gpt_oss(dtype: torch.dtype) -> None:
    gate, up = (5 * torch.randn(2, 5, 63)).to(dtype)
    experts = GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=1))
    expected = experts._apply_gate(torch.stack((gate, up), dim=-1).flatten(1))
    made = gate_mul(torch.cat((gate, up), dim=1), Gate.CLAMPED)
    torch.testing.assert_close(made, expected, atol=1e-5 if dtype == torch.float32 else 0.25, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_float32_weights_rounds_once_as_gemmas_does(dtype: torch.dtype) -> None:
    module = Gemma2RMSNorm(63, eps=1e-5).to(dtype)
    torch.nn.init.normal_(module.weight)
    x = torch.randn(3, 63).to(dtype)
    with torch.inference_mode():
        assert torch.equal(reference.rms_norm(x, 1.0 + module.weight.float(), 1e-5), module(x))


def test_numbers_after_the_rotated_pairs_are_unchanged() -> None:
    x, angles = torch.randn(4, 2, 10), torch.randn(4, 3)
    turned = rotary(x, angles.cos(), angles.sin())
    assert torch.equal(turned[..., 6:], x[..., 6:])
    assert torch.equal(turned[..., :6], rotary(x[..., :6], angles.cos(), angles.sin()))


def test_launchers_reject_inputs_outside_their_contracts() -> None:
    with pytest.raises(ValueError, match=r"weight must be \[4\]"):
        rms_norm(torch.zeros(2, 4), torch.zeros(3), 1e-6)
    with pytest.raises(ValueError, match=r"weight must be torch\.float32"):
        rms_norm(torch.zeros(2, 4), torch.zeros(4).bfloat16(), 1e-6)
    with pytest.raises(ValueError, match="sin must be"):
        rotary(torch.zeros(2, 1, 4), torch.zeros(2, 2), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="at most 2"):
        rotary(torch.zeros(2, 1, 4), torch.zeros(2, 4), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="gate_up"):
        gate_mul(torch.zeros(2, 5))


@pytest.mark.parametrize("spoilt", [torch.ones(4).bfloat16(), torch.ones(3), torch.ones(8)[::2]])
def test_norms_of_heads_that_kernels_could_not_read_are_refused(spoilt: torch.Tensor) -> None:
    kv, angles = KvLayer(torch.zeros(2, 2, 1, 4, 4), None), torch.zeros(2, 2)
    for norms in (HeadNorms(spoilt, torch.ones(4), 1e-6), HeadNorms(torch.ones(4), spoilt, 1e-6)):
        with pytest.raises(ValueError, match="norm must be"):
            rotate_and_store(torch.zeros(2, 3, 4), angles, angles, norms, kv, torch.arange(2))


def test_norm_reads_strided_input() -> None:
    x, weight = torch.randn(3, 40), torch.randn(80)[::2]
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
