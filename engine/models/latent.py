"""Multi-head latent attention (MLA, arXiv:2405.04434): one row of a token is kept, and all heads attend to it.

Keys and values of the heads are projections of the row, and are never made: the projection to keys is applied to
queries instead, and the projection to values to what was attended to ("absorbed", section 2.1.2). So attention is that
of many queries over one key, whose beginning is the value.
"""

import math
from dataclasses import dataclass

import torch

from baton.engine.config.model_config import LatentConfig
from baton.engine.kv_cache.groups import LayerPlace
from baton.engine.lora.adapters import without_adapters
from baton.engine.models.batch import AdapterRows, Rotation
from baton.engine.models.linear import HeadLinear, Linear, PackedHeads, packed_weight
from baton.engine.models.residual import Norm
from baton.kernels.native.layers import PackedLatent
from baton.kernels.norms import rotary
from baton.kernels.types import Scoring

MOST_TOGETHER = 16  # heads that read a row together: as many as a matrix instruction of a GPU takes


def groups_of(heads: int) -> int:
    """In which heads read what all of them share."""
    return heads // math.gcd(heads, MOST_TOGETHER)


@dataclass(frozen=True, slots=True)
class Latent:
    """What latent attention has in place of keys and values of heads."""

    sizes: LatentConfig
    query_norm: Norm | None
    query_up: Linear | None  # to all queries; None: they are made of the stream at once
    norm: Norm  # of the numbers that stand for keys and values
    to_keys: HeadLinear  # of each head nope_dim to rank
    to_values: HeadLinear  # of each head rank to value_dim

    def rows(
        self, made: torch.Tensor, angles: Rotation, adapters: AdapterRows | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, `[tokens, heads, rank + rope_dim]`, and what is kept of the tokens, `[tokens, 1, rank + rope_dim]`.

        made: `[tokens, ...]`, of a token its query, or what that is made of, and then its row.
        """
        sizes, (cos, sin, _) = self.sizes, angles.of_tokens()
        of_query, row, turning = made.split(
            (made.shape[1] - sizes.rank - sizes.rope_dim, sizes.rank, sizes.rope_dim), 1
        )
        if self.query_up is not None and self.query_norm is not None:
            of_query = self.query_up(self.query_norm(of_query), adapters)
        heads = of_query.view(len(made), -1, sizes.nope_dim + sizes.rope_dim)
        staying, turning_query = heads.split((sizes.nope_dim, sizes.rope_dim), 2)
        key = torch.cat((self.norm(row)[:, None], self._turned(turning[:, None], cos, sin)), dim=2)
        query = torch.cat((self.to_keys(staying), self._turned(turning_query, cos, sin)), dim=2)
        return query, key

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """`[tokens, heads * value_dim]` of `[tokens, heads, rank]`."""
        return self.to_values(attended).flatten(1)

    def packed(self, scoring: Scoring, table: int, place: LayerPlace) -> PackedLatent | None:
        """None where something of it is not packed."""
        to_keys, to_values, sizes = self.to_keys, self.to_values, self.sizes
        query_up = None if self.query_up is None else packed_weight(without_adapters(self.query_up))
        if not isinstance(to_keys, PackedHeads) or not isinstance(to_values, PackedHeads):
            return None
        if self.query_up is not None and query_up is None:
            return None
        return PackedLatent(
            query_norm=None if self.query_norm is None else self.query_norm.weight.float(),
            query_up=query_up,
            norm=self.norm.weight.float(),
            to_keys=to_keys.weight,
            to_values=to_values.weight,
            nope_dim=sizes.nope_dim,
            rope_dim=sizes.rope_dim,
            value_dim=sizes.value_dim,
            groups=groups_of(to_keys.heads),
            eps=self.norm.eps,
            is_interleaved=sizes.interleaved,
            scoring=scoring,
            table=table,
            place=place.place,
            group=place.group,
        )

    def _turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Pairs end up half a head apart, of queries and keys alike: products do not depend on their order."""
        if self.sizes.interleaved:
            x = x.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2)
        return rotary(x, cos, sin)
