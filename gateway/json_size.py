"""How much there is in a JSON text, counted before anything is made of it. Pure.

Parsing holds the event loop, and so all clients' tokens. Its time depends on the number of values in the text, far
more than on its length: 4 MB of one text are 6 ms, of empty lists or of short messages half a second.
"""

from typing import NamedTuple

MAX_VALUES = (1 << 17) + (1 << 12)
"""A prompt of 128 Ki token ids, and some more. So many numbers are 10 ms."""
MAX_TEXTS = 1 << 14
"""Keys are texts too: a conversation has four or more for each message."""
MAX_CONTAINERS = 1 << 13


class JsonSize(NamedTuple):
    """Of a text that is no JSON: of what stands before the place where it stops being so, at least."""

    values: int
    texts: int
    containers: int  # lists and objects

    @property
    def excess(self) -> str | None:
        """The count that is too high; None where all is in bounds."""
        for counted, most, name in (
            (self.texts, MAX_TEXTS, "texts and keys"),
            (self.containers, MAX_CONTAINERS, "lists and objects"),
            (self.values, MAX_VALUES, "elements"),
        ):
            if counted > most:
                return f"more than {most} {name}"
        return None


def json_size(body: bytes) -> JsonSize:
    """Takes a few milliseconds for 4 MB. Of a body with too many texts only those are counted."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    texts = plain.count(b'"') // 2
    if texts > MAX_TEXTS:
        return JsonSize(0, texts, 0)
    outside = b"".join(plain.split(b'"')[::2])
    return JsonSize(outside.count(b",") + 1, texts, outside.count(b"[") + outside.count(b"{"))
