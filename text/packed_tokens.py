"""Token ids as protobuf packs them: base 128, lowest seven bits first. Pure.

Packed parts can be concatenated: of a prompt that continues a known one, only the new part is packed. Source:
https://protobuf.dev/programming-guides/encoding (packed repeated fields, and merging of embedded messages).
"""

from collections.abc import Iterable

BYTES = 2  # wire type of values with a length


def varint(number: int) -> bytes:
    """Return a number of at least 0 in base 128."""
    packed = bytearray()
    while number > 0x7F:
        packed.append(number & 0x7F | 0x80)
        number >>= 7
    packed.append(number)
    return bytes(packed)


class TokenPacker(dict[int, bytes]):
    """Packer for many prompts of one vocabulary, which packs each token once."""

    def __missing__(self, token_id: int) -> bytes:
        packed = self[token_id] = varint(token_id)
        return packed

    def pack(self, token_ids: Iterable[int]) -> bytes:
        return b"".join(map(self.__getitem__, token_ids))


def field(number: int, content: bytes) -> bytes:
    """Return a field of a message: packed numbers, an embedded message or bytes."""
    return varint(number << 3 | BYTES) + varint(len(content)) + content
