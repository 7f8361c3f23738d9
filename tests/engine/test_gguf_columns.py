"""A GGUF projection whose columns are in the file's own order multiplies like its dequantised numbers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from baton.engine.models.linear import MatmulBackend, packs
from baton.engine.weights.gguf_file import dequantise
from baton.engine.weights.weight import GgufWeight
from baton.text.gguf.header import BLOCKS, TensorType

FIXTURES = Path(__file__).parents[1] / "fixtures" / "quantized"
CPU = torch.device("cpu")
LARGEST = 1e4  # random blocks with larger numbers become zero
KINDS = (TensorType.BF16, TensorType.Q4_0, TensorType.Q8_0, TensorType.Q4_K, TensorType.Q6_K, TensorType.IQ4_XS)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head", [64, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_columns_in_another_order_give_the_same_products(kind: TensorType, head: int, packed: bool) -> None:
    if packed and not packs(CPU):
        pytest.skip("native kernels are not built")
    stored = load_file(FIXTURES / "blocks.safetensors")[f"{kind.name}.stored"].view(-1, BLOCKS[kind].size_bytes)
    finite = dequantise(stored, kind).abs().amax(1).nan_to_num(torch.inf) < LARGEST
    stored = (stored * finite[:, None]).view(2, -1)
    order = torch.arange(256).view(-1, 2, head).transpose(0, 1).flatten()  # input of each column
    numbers = dequantise(stored, kind)[:, order.argsort()]
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    linear = MatmulBackend(CPU, torch.float32, packed).linear(GgufWeight(stored, kind, column_order=order))
    torch.testing.assert_close(linear(x), x @ numbers.T, rtol=0.0, atol=5e-3 * float(numbers.abs().max()))
