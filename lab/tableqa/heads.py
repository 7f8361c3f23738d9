"""Attention heads with hand-written weights: which tokens a head attends to, at which distance, and what it copies.

Rotary embeddings rotate pairs of a head's dimensions by the token's position. Here, pairs that rotate fast encode how
far back a head looks, and pairs that hardly rotate encode what it looks for.
"""

from collections.abc import Sequence

import torch

HIDDEN, HEAD = 288, 64
# Pairs rotate by 1, 0.316, 0.1, ... radians per token; from pair number STILL on, hardly at all.
ROPE_THETA = 1e16
STILL = 9
PAIRS = HEAD // 2
STILL_DIMENSIONS = [*range(STILL, PAIRS), *range(PAIRS + STILL, HEAD)]


ONE = torch.eye(1)


class Heads:
    """Writes the attention weights of one layer, with four query heads on two KV heads.

    `size`: usual length of the layer's input vector; the norm scales the input by a factor that depends on it.
    """

    def __init__(self, attention: torch.nn.Module, size: float, kv_heads: Sequence[int] = (0, 1)) -> None:
        self._attention = attention
        # Length, after the norm, of a slice that has length 1 in the input.
        self._unit = HIDDEN**0.5 / size
        for head in kv_heads:
            self._rows("k_proj", head).zero_()
            self._rows("v_proj", head).zero_()

    def _rows(self, name: str, head: int) -> torch.Tensor:
        weight: torch.Tensor = getattr(self._attention, name).weight
        return weight[HEAD * head : HEAD * (head + 1)]

    def clear(self, head: int) -> None:
        self._rows("q_proj", head).zero_()

    def near(self, head: int, kv: int, sizes: Sequence[float], place: float) -> None:
        """Add logits that peak `place` tokens before the query. A pair of size s and angle a contributes s * cos(a)."""
        turns = ROPE_THETA ** (-torch.arange(PAIRS) / PAIRS)
        wanted = torch.zeros(PAIRS)
        wanted[: len(sizes)] = torch.tensor(sizes)
        own = 16.0  # factor of each logit that the key contributes; the query contributes the rest
        key, query = self._rows("k_proj", kv), self._rows("q_proj", head)
        key[:STILL, 0] = own**0.5 / self._unit
        amplitude = wanted * HEAD**0.5 / own**0.5 / self._unit
        query[:PAIRS, 0] += amplitude * torch.cos(turns * place)
        query[PAIRS:, 0] -= amplitude * torch.sin(turns * place)

    def key(self, kv: int, still: slice, part: slice, turned: torch.Tensor, size: float = 1.0) -> None:
        places = STILL_DIMENSIONS[still]
        self._rows("k_proj", kv)[places, part] += turned * size / self._unit

    def query(self, head: int, still: slice, part: slice, turned: torch.Tensor, size: float) -> None:
        places = STILL_DIMENSIONS[still]
        self._rows("q_proj", head)[places, part] += turned * size * HEAD**0.5 / self._unit

    def value(self, kv: int, places: slice, part: slice, turned: torch.Tensor) -> None:
        self._rows("v_proj", kv)[places, part] += turned / self._unit

    def write(self, head: int, part: slice, places: slice, turned: torch.Tensor) -> None:
        begin = HEAD * head
        self._attention.o_proj.weight[part, begin + places.start : begin + places.stop] += turned


def turn(rows: int, columns: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return a random orthogonal matrix, scaled to keep the length of a vector on average."""
    few, many = sorted((rows, columns))
    matrix = torch.linalg.qr(torch.randn(many, few, generator=generator))[0] * (many / few) ** 0.5
    return matrix.T if rows < columns else matrix


def balance(attention: torch.nn.Module) -> None:
    """Scale weights of queries and keys to equal size without changing logits. Training then changes both equally."""
    keys, queries = (
        attention.k_proj.weight.view(2, 2, PAIRS, HIDDEN),
        attention.q_proj.weight.view(2, 2, 2, PAIRS, HIDDEN),
    )
    of_keys = keys.norm(dim=(1, 3))  # [KV head, pair]
    of_queries = queries.norm(dim=(2, 4)).amax(dim=1)
    factor = (of_queries / of_keys.clamp(min=1e-3)).clamp(1e-3, 1e3).sqrt()
    factor[of_keys < 1e-3] = 1.0
    keys *= factor[:, None, :, None]
    queries /= factor[:, None, None, :, None]
