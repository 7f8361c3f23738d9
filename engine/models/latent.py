"""Multi-head latent attention (MLA, arXiv:2405.04434): one row per token is stored and shared by all heads.

Keys and values, which are projections of the row, are never computed: the key projection is applied to queries, and the
value projection to attention's output ("absorbed", section 2.1.2). So attention has many queries and one key, whose
prefix is the value.
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

MOST_TOGETHER = 16  # heads that share one read of a row: as many as a GPU's matrix instruction has rows


def groups_of(heads: int) -> int:
    """Return the number of groups into which heads are divided; the heads of a group share one read of a row."""
    return heads // math.gcd(heads, MOST_TOGETHER)


@dataclass(frozen=True, slots=True)
class Latent:
    """Projections and norms of latent attention."""

    sizes: LatentConfig
    query_norm: Norm | None
    query_up: Linear | None  # projection to the queries of all heads; None: `qkv` computes the queries
    norm: Norm  # norm of the latent row
    to_keys: HeadLinear  # projection per head, from nope_dim to rank numbers
    to_values: HeadLinear  # projection per head, from rank to value_dim numbers

    def rows(
        self, made: torch.Tensor, angles: Rotation, adapters: AdapterRows | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries, `[tokens, heads, rank + rope_dim]`, and stored rows, `[tokens, 1, rank + rope_dim]`.

        made: `[tokens, ...]`, per token its query (or the input of `query_up`), then its row before norm and rotation.
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
        """Project attention's output `[tokens, heads, rank]` to values `[tokens, heads * value_dim]`."""
        return self.to_values(attended).flatten(1)

    def packed(self, scoring: Scoring, table: int, place: LayerPlace) -> PackedLatent | None:
        """Return the layer as native kernels read it; None if one of its weights is not packed."""
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
        """Rotate `x`. Interleaved pairs are moved half a head apart in queries and keys, whose products stay equal."""
        if self.sizes.interleaved:
            x = x.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2)
        return rotary(x, cos, sin)
