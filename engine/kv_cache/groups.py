"""Division of a model's layers into groups of equal size, whose KV shares blocks: see text/block_groups.py. Pure."""

from dataclasses import dataclass
from typing import NamedTuple

from baton.engine.config.model_config import DecoderConfig, ModelConfig
from baton.text.block_groups import BlockGroups

MAX_PADDING_SHARE = 0.08  # maximum unused share of a column
MAX_GROUPS = 32
MIN_POSITIONS_RATIO = 2  # minimum context length / window size: with less, groups save next to nothing


class LayerPlace(NamedTuple):
    """Index of a layer's KV in a column."""

    group: int
    place: int  # index in the group's block


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Assignment of a model's layers to groups."""

    groups: BlockGroups
    layers: int  # layers per group
    places: tuple[LayerPlace, ...]  # one per layer with KV, in order


def layer_groups(config: ModelConfig, block_tokens: int) -> LayerGroups:
    """Return one group, or the fewest groups with little padding if layers with and without a window are mixed."""
    windows = config.sliding_window if isinstance(config, DecoderConfig) else ()
    one = LayerGroups(BlockGroups(), config.kv_layers, tuple(LayerPlace(0, at) for at in range(config.kv_layers)))
    sizes = {window for window in windows if window is not None}
    whole_layers = windows.count(None)
    windowed_layers = len(windows) - whole_layers
    if len(sizes) != 1 or not whole_layers or len(windows) != config.kv_layers:
        return one
    [window] = sizes
    layers = _layers_of_a_group(whole_layers, windowed_layers)
    if layers is None or config.max_positions < MIN_POSITIONS_RATIO * window:
        return one
    groups = BlockGroups(-(-whole_layers // layers), -(-windowed_layers // layers), window, block_tokens)
    seen = {True: 0, False: groups.whole * layers}  # next index: True: without window, False: with one
    places = []
    for each in windows:
        places.append(LayerPlace(*divmod(seen[each is None], layers)))
        seen[each is None] += 1
    return LayerGroups(groups, layers, tuple(places))


def layer_places(config: ModelConfig) -> tuple[LayerPlace, ...]:
    """Return the index in a column of each layer with KV, in order."""
    return layer_groups(config, block_tokens=1).places


def _layers_of_a_group(whole: int, windowed: int) -> int | None:
    """Return the layers per group that give the fewest groups with little padding; None if that is too many groups."""
    best: tuple[int, int] | None = None  # number of groups, layers per group
    for layers in range(1, max(whole, windowed) + 1):
        groups = -(-whole // layers) + -(-windowed // layers)
        if groups * layers <= (1 + MAX_PADDING_SHARE) * (whole + windowed) and (best is None or groups < best[0]):
            best = groups, layers
    return None if best is None or best[0] > MAX_GROUPS else best[1]
