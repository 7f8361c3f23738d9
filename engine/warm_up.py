"""Plans that make a device set up all that its first requests would otherwise wait for: kernels are compiled by shape.

Pure. All of them use block 0 alone, over and over: the results are not used.
"""

from collections.abc import Iterator

from engine.plan import Chunk, Plan, Sample
from engine.sampling_params import SamplingParams

CHUNK_TOKENS = (2, 8, 16, 32, 64, 128)  # prompts of which each takes another tile (kernels/triton/launch.py)
CONTEXT_BLOCKS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 68, 80, 96, 128, 256)  # split into more and more parts, most of all
LIKELIEST = Sample(0, SamplingParams(max_tokens=1))
DRAWN = Sample(0, SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9))


def warm_up_plans(block_tokens: int, longest: int, compiles: bool) -> Iterator[Plan]:
    """One prompt and one answer; where the device `compiles` kernels at first use, of every size that it distinguishes.

    `longest`: positions of the model, in tokens.
    """
    tokens = min(2, block_tokens)
    yield Plan((Chunk(0, [0] * tokens, 0, [0]),))
    yield Plan((Chunk(0, [0], tokens - 1, [0], (LIKELIEST,)),))
    if not compiles:
        return
    for tokens in CHUNK_TOKENS:
        if tokens <= longest:
            yield Plan((Chunk(0, [0] * tokens, 0, [0] * -(-tokens // block_tokens), (DRAWN,)),))
    for blocks in CONTEXT_BLOCKS:
        if blocks * block_tokens <= longest:
            yield Plan((Chunk(0, [0], blocks * block_tokens - 1, [0] * blocks, (DRAWN,)),))
