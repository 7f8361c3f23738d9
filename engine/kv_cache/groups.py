"""Division of a model's layers into groups of equal size, whose KV shares blocks: see text/block_groups.py. Pure."""

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from baton.engine.config.model_config import ModelConfig
from baton.text.block_groups import BlockGroups

MAX_PADDING_SHARE = 0.08  # maximum unused share of a column
MAX_GROUPS = 32
MIN_POSITIONS_RATIO = 2  # minimum context length / window size: with less, groups save next to nothing


class LayerPlace(NamedTuple):
    """Index of a layer's KV in a column."""

    group: int
    place: int  # index in the group's block, in units: keys and values of the pool's shape


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Assignment of a model's layers to groups."""

    groups: BlockGroups
    layers: int  # units per group
    places: tuple[LayerPlace, ...]  # one per layer with KV, in order


def layer_groups(config: ModelConfig, block_tokens: int) -> LayerGroups:
    """Return one group, or the fewest groups with little padding that separate layers with and without a window."""
    windows, units = config.kv_windows, config.kv_units
    firsts = itertools.accumulate(units[:-1], initial=0)
    one = LayerGroups(BlockGroups(), sum(units), tuple(LayerPlace(0, first) for first in firsts))
    sizes = {window for window in windows if window is not None}
    is_whole = [window is None for window in windows]
    if len(sizes) != 1 or len(set(zip(is_whole, units, strict=True))) > 2:
        return one
    [window] = sizes
    of_kind = {
        kind: sum(size for each, size in zip(is_whole, units, strict=True) if each is kind) for kind in (True, False)
    }
    layers = _layers_of_a_group(of_kind[True], of_kind[False], math.lcm(*units))
    if layers is None or config.max_positions < MIN_POSITIONS_RATIO * window:
        return one
    groups = BlockGroups(-(-of_kind[True] // layers), -(-of_kind[False] // layers), window, block_tokens)
    seen = {True: 0, False: groups.whole * layers}  # next index: True: without window, False: with one
    places = []
    for each, size in zip(is_whole, units, strict=True):
        places.append(LayerPlace(*divmod(seen[each], layers)))
        seen[each] += size
    return LayerGroups(groups, layers, tuple(places))


def layer_places(config: ModelConfig) -> tuple[LayerPlace, ...]:
    """Return the index in a column of each layer with KV, in order."""
    return layer_groups(config, block_tokens=1).places


def _layers_of_a_group(whole: int, windowed: int, step: int) -> int | None:
    """Return the units per group that give the fewest groups with little padding; None if that is too many groups.

    The result is a multiple of `step`, so that a layer of several units is in one group.
    """
    best: tuple[int, int] | None = None  # number of groups, units per group
    for layers in range(step, max(whole, windowed) + step, step):
        groups = -(-whole // layers) + -(-windowed // layers)
        if groups * layers <= (1 + MAX_PADDING_SHARE) * (whole + windowed) and (best is None or groups < best[0]):
            best = groups, layers
    return None if best is None or best[0] > MAX_GROUPS else best[1]
