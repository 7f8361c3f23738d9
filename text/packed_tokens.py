"""Token ids as protobuf packs them in a message: base 128, the lowest seven bits first. Pure.

What is packed can be joined: of a prompt that continues a known one, only the new part is packed. Source:
https://protobuf.dev/programming-guides/encoding (packed repeated fields, and how embedded messages merge).
"""

from collections.abc import Iterable

BYTES = 2  # the wire type of all that has a length


def varint(number: int) -> bytes:
    """`number`: at least 0."""
    packed = bytearray()
    while number > 0x7F:
        packed.append(number & 0x7F | 0x80)
        number >>= 7
    packed.append(number)
    return bytes(packed)


class TokenPacker(dict[int, bytes]):
    """Packs many prompts of one vocabulary: each token is packed once."""

    def __missing__(self, token_id: int) -> bytes:
        packed = self[token_id] = varint(token_id)
        return packed

    def pack(self, token_ids: Iterable[int]) -> bytes:
        return b"".join(map(self.__getitem__, token_ids))


def field(number: int, content: bytes) -> bytes:
    """A field of a message: packed numbers, an embedded message or bytes."""
    return varint(number << 3 | BYTES) + varint(len(content)) + content
