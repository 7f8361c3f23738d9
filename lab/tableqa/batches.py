"""Batches of a training step: dialogues of several lengths, and repeated random tokens."""

import random
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerFast

from baton.lab.tableqa import train_data
from baton.lab.tableqa.table_turns import json_listing, listing, table_turn
from baton.lab.tableqa.tokens import encode
from baton.lab.tableqa.tool_turns import tool_dialogue
from baton.lab.tableqa.train_data import DialoguePart, fact_dialogue, said, spoken

INVENTED = 0.6
TOKENS_OF_A_TURN = 28  # a low estimate: dialogues come out too long and are cut, so there is little padding


class Length(NamedTuple):
    tokens: int
    batch: int
    least_rows: int
    most_rows: int


LENGTHS = (
    Length(256, 9, 2, 5),
    Length(384, 6, 4, 10),
    Length(640, 4, 8, 20),
    Length(896, 3, 16, 32),
    Length(1280, 2, 30, 60),
)
# Relative frequency of each of LENGTHS, by stage of training.
STAGES = ((1, 0, 0, 0, 0), (2, 3, 0, 0, 0), (1, 2, 3, 0, 0), (2, 4, 8, 6, 2))


class TrainBatch(NamedTuple):
    tokens: torch.Tensor  # [batch, length]
    weights: torch.Tensor  # [batch, length]: weight of each token in the loss


class Batches:
    """Generator of training batches, with its own random numbers."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rng: random.Random, generator: torch.Generator) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self._generator = generator

    def copying(self, batch: int = 16, length: int = 128) -> TrainBatch:
        """Generate repeated random spans: they train induction heads, which reading a table needs."""
        span = self._rng.randint(8, 60)
        drawn = torch.randint(3, len(self._tokenizer), (batch, span), generator=self._generator)
        tokens = drawn.repeat(1, length // span + 1)[:, :length]
        weights = torch.ones(tokens.shape)
        weights[:, : span + 1] = 0.0
        return TrainBatch(tokens, weights)

    def dialogues(self, stage: int) -> TrainBatch:
        length = self._rng.choices(LENGTHS, STAGES[stage])[0]
        drawn = [self._encode(self._dialogue(length), length.tokens) for _ in range(length.batch)]
        tokens, weights = zip(*drawn, strict=True)
        return TrainBatch(torch.tensor(tokens), torch.tensor(weights))

    def _dialogue(self, length: Length) -> list[DialoguePart]:
        rng = self._rng
        invented = INVENTED if rng.random() < 0.8 else 0.0
        draw = rng.random()
        if draw < 0.08:
            return fact_dialogue(rng, length.tokens // TOKENS_OF_A_TURN)
        if draw < 0.23:
            rows = rng.randint(2, length.most_rows // 2) if rng.random() < 0.3 else 0
            return tool_dialogue(rng, rows, length.tokens // TOKENS_OF_A_TURN, invented)
        numbered = rng.random() < 0.8
        lists = rng.random() < 0.15
        rows = rng.randint(length.least_rows, length.most_rows) // (2 if lists else 1)
        persons = train_data.people(rng, rows, invented)
        parts = [said("system", train_data.any_table(rng, persons, numbered))]
        turns = (length.tokens - 18 * rows) // TOKENS_OF_A_TURN
        asked = [table_turn(rng, persons, numbered, invented) for _ in range(max(4, turns))]
        if lists:
            long = json_listing(rng, persons) if rng.random() < 0.15 else listing(rng, persons, numbered)
            asked.insert(rng.randint(0, 2), long)
        for turn in asked:
            parts += spoken(turn)
        return parts

    def _encode(self, parts: list[DialoguePart], length: int) -> tuple[list[int], list[float]]:
        tokens, weights = encode(self._tokenizer, parts)
        padding = max(0, length - len(tokens))
        return (tokens[:length] + [self._tokenizer.pad_token_id] * padding, weights[:length] + [0.0] * padding)
