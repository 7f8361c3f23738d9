"""Token ids as protobuf packs them: base 128, lowest seven bits first. Pure.

Packed parts can be concatenated: if a prompt continues an earlier prompt, only the new tokens must be packed. Source:
https://protobuf.dev/programming-guides/encoding (packed repeated fields, and merging of embedded messages).
"""

from collections.abc import Iterable

BYTES = 2  # protobuf's wire type of values with a length


def varint(number: int) -> bytes:
    """Return a number, at least 0, in protobuf's base 128 encoding."""
    packed = bytearray()
    while number > 0x7F:
        packed.append(number & 0x7F | 0x80)
        number >>= 7
    packed.append(number)
    return bytes(packed)


class TokenPacker(dict[int, bytes]):
    """Packer for many prompts of one vocabulary; it encodes each token id only once."""

    def __missing__(self, token_id: int) -> bytes:
        packed = self[token_id] = varint(token_id)
        return packed

    def pack(self, token_ids: Iterable[int]) -> bytes:
        return b"".join(map(self.__getitem__, token_ids))


def field(number: int, content: bytes) -> bytes:
    """Return an encoded field of a message. `content`: packed numbers, an embedded message or bytes."""
    return varint(number << 3 | BYTES) + varint(len(content)) + content
