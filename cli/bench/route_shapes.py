"""Made-up traces of the shapes that traffic has, and of some that break policies. The same ones for the same seed."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count

from cli.bench.route_trace import BLOCK_TOKENS, Arrival, block_ids, from_zero

DURATION_S = 900.0


class _Maker:
    """Prompts are made of blocks that are new, or were made before."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self._numbers = count()

    def blocks(self, at_least: int, at_most: int | None = None) -> tuple[bytes, ...]:
        length = at_least if at_most is None else self.draw.randint(at_least, at_most)
        return block_ids(next(self._numbers) for _ in range(length))

    def moment_s(self) -> float:
        return self.draw.uniform(0, DURATION_S)

    def pause_s(self, mean: float) -> float:
        return self.draw.expovariate(1 / mean)

    def arrival(self, at_s: float, blocks: Sequence[bytes], output_tokens: int = 200) -> Arrival:
        """The last block is filled by chance."""
        tokens = len(blocks) * BLOCK_TOKENS - self.draw.randint(0, BLOCK_TOKENS - 12)
        return Arrival(at_s, tokens, output_tokens, tuple(blocks))


def chat(make: _Maker) -> Iterator[Arrival]:
    """Conversations of a few turns behind one short system prompt, some over a long document."""
    system = make.blocks(2)
    for _ in range(1500):
        at_s, blocks = make.moment_s(), [*system, *make.blocks(make.draw.choice((1, 2, 4, 30)))]
        for _ in range(1 + int(make.pause_s(4))):
            yield make.arrival(at_s, blocks, 300)
            blocks += make.blocks(1, 3)
            at_s += 5 + make.pause_s(40)


def agents(make: _Maker) -> Iterator[Arrival]:
    """Loops of many steps with one of three long system prompts; each step adds a tool's output."""
    systems = [make.blocks(16) for _ in range(3)]
    for _ in range(150):
        at_s, blocks = make.moment_s(), list(make.draw.choice(systems))
        for _ in range(make.draw.randint(8, 40)):
            blocks += make.blocks(1, 5)
            yield make.arrival(at_s, blocks)
            at_s += 2 + make.pause_s(8)


def tenants(make: _Maker) -> Iterator[Arrival]:
    """Four hundred system prompts, some much more popular than others, and unrelated questions."""
    prompts = [make.blocks(6, 20) for _ in range(400)]
    weights = [1 / (rank + 3) ** 0.8 for rank in range(len(prompts))]
    for prompt in make.draw.choices(prompts, weights, k=6000):
        yield make.arrival(make.moment_s(), [*prompt, *make.blocks(2)])


def documents(make: _Maker) -> Iterator[Arrival]:
    """Long documents, each asked about a few times in a row."""
    for _ in range(350):
        document, at_s = make.blocks(10, 120), make.moment_s()
        for _ in range(make.draw.randint(1, 20)):
            yield make.arrival(at_s, [*document, *make.blocks(1)], 150)
            at_s += make.pause_s(10)


def hot_document(make: _Maker) -> Iterator[Arrival]:
    """From one moment on, most requests are about the same long document."""
    document = make.blocks(100)
    for _ in range(5000):
        at_s = make.moment_s()
        if DURATION_S / 3 < at_s < 0.8 * DURATION_S and make.draw.random() < 0.6:
            yield make.arrival(at_s, [*document, *make.blocks(1)])
        else:
            yield make.arrival(at_s, make.blocks(3, 20))


def oversized_prefix(make: _Maker) -> Iterator[Arrival]:
    """Among ordinary prompts, some share a prefix that may be larger than one worker's cache."""
    prefix = make.blocks(1500)
    for _ in range(4000):
        shares = make.draw.random() < 0.03
        blocks = [*prefix, *make.blocks(1)] if shares else make.blocks(3, 20)
        yield make.arrival(make.moment_s(), blocks)


SHAPES: Mapping[str, Callable[[_Maker], Iterator[Arrival]]] = {
    each.__name__: each for each in (chat, agents, tenants, documents, hot_document, oversized_prefix)
}


def make_trace(shape: str, seed: int = 0) -> list[Arrival]:
    """Raises: KeyError for a shape that there is not."""
    return from_zero(SHAPES[shape](_Maker(seed)))
