"""Numbers of a step on their way to the device."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.models.batch import ALIGNED_BYTES, to_device
from tests.fixtures.paged import CPU


@given(
    st.lists(st.tuples(st.sampled_from("qdf"), st.integers(0, 9)), min_size=1).filter(lambda s: any(n for _, n in s))
)
def test_every_tensor_is_aligned_and_unchanged(parts: list[tuple[str, int]]) -> None:
    arrays = [array(code, range(length)) for code, length in parts]
    tensors = to_device(arrays, CPU)
    assert [tensor.tolist() for tensor in tensors] == [each.tolist() for each in arrays]
    assert all(tensor.data_ptr() % ALIGNED_BYTES == 0 for tensor in tensors if len(tensor))
