"""Token ids are packed as protobuf packs them."""

import hypothesis.strategies as st
from hypothesis import given

from baton.protos import session_pb2
from baton.text.packed_tokens import TokenPacker, field

NUMBER = session_pb2.Start.DESCRIPTOR.fields_by_name["token_ids"].number
IDS = st.lists(st.integers(0, 2**32 - 1) | st.sampled_from([0, 127, 128, 16_383, 16_384]), min_size=1)


@given(IDS)
def test_packed_tokens_are_the_bytes_that_protobuf_writes(token_ids: list[int]) -> None:
    expected = session_pb2.Start(token_ids=token_ids).SerializeToString()
    assert field(NUMBER, TokenPacker().pack(token_ids)) == expected


@given(IDS, IDS)
def test_joined_parts_equal_the_complete_list(first: list[int], second: list[int]) -> None:
    packer = TokenPacker()
    assert packer.pack(first) + packer.pack(second) == packer.pack(first + second)


@given(IDS)
def test_embedded_message_in_two_pieces_is_one(token_ids: list[int]) -> None:
    head = session_pb2.ConnectRequest(number=7, start=session_pb2.Start(attempt_id=5, cache_root=b"root"))
    number = session_pb2.ConnectRequest.DESCRIPTOR.fields_by_name["start"].number
    piece = field(number, field(NUMBER, TokenPacker().pack(token_ids)))
    head_bytes = head.SerializeToString()
    head.start.token_ids.extend(token_ids)
    assert session_pb2.ConnectRequest.FromString(head_bytes + piece) == head
