"""How many programs share one sequence's context in decode attention. Knows sizes, not tensors."""

import functools
import math

MAX_SPLITS = 128  # what one program combines at a time
START_TILES = 2  # what a program costs beside its tiles, in tiles: its start, and the first loads that nothing hides
COMBINE_TILES = 4  # what a second kernel costs


@functools.cache
def decode_splits(pairs: int, tiles: int, multiprocessors: int, filling: int) -> int:
    """The split that ends first; the fewest parts of those.

    pairs: sequences times KV heads; tiles: of an average context; filling: programs that together read memory as fast
    as a multiprocessor can: fewer are no faster, more share what there is. Many pairs fill the device by themselves,
    and every further part costs: measured elsewhere, too many at a large batch lose a third (TileOPs, H200).
    """
    best, least = 1, math.inf
    for splits in range(1, max(1, min(tiles, MAX_SPLITS)) + 1):
        share = max(-(-pairs * splits // multiprocessors), filling)  # programs of the busiest multiprocessor
        time = share * (-(-tiles // splits) + START_TILES) + (COMBINE_TILES if splits > 1 else 0)
        if time < least:
            best, least = splits, time
    return best
