"""The weights from which training starts: heads that look a few tokens back, and heads that find a repeated place.

From random weights a model this small takes millions of tokens until it copies at all. Here the first layer brings each
token the three before it, and the second looks for an earlier place with the same three: an induction head. Training
does the rest, and is free to change all of it.
"""

import torch
from transformers import LlamaForCausalLM

EMBEDDED = 0.06  # standard deviation of the embedding
WORDS = slice(1, 96)  # dimensions of the embedding; dimension 0 is the same for all tokens, the others are empty
HEAD, BACK = 32, 3
LOOK_BACK, FIND = 1.5, 1.5  # how sharp
TURNING = 5  # pairs of dimensions of a head that turn so fast that neighbouring places differ


@torch.no_grad()
def prepare(model: LlamaForCausalLM) -> None:
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0.0, EMBEDDED)
    embedding[:, WORDS.stop :] = 0.0
    embedding[:, 0] = 4 * EMBEDDED
    model.lm_head.weight.copy_(embedding)
    model.lm_head.weight[:, 0] = 0.0
    hidden = embedding.shape[1]
    words = torch.zeros(HEAD, hidden)
    words[:, WORDS] = _orthogonal(HEAD, WORDS.stop - WORDS.start)
    _look_back(model.model.layers[0].self_attn, words, model.config.rope_parameters["rope_theta"])
    _find(model.model.layers[1].self_attn, words)


def _look_back(attention: torch.nn.Module, words: torch.Tensor, theta: float) -> None:
    """Query head i attends to the place i + 1 before; the first three write what they see into the empty dimensions."""
    pairs = HEAD // 2
    turns = theta ** (-torch.arange(pairs) / pairs)
    size = torch.zeros(pairs)
    size[:TURNING] = LOOK_BACK
    for key in attention.k_proj.weight.split(HEAD):
        key[:, 0] = torch.cat((size, torch.zeros(pairs)))
    for place, query in enumerate(attention.q_proj.weight.split(HEAD), start=1):
        query[:, 0] = torch.cat((size * torch.cos(turns * place), -size * torch.sin(turns * place)))
    attention.v_proj.weight[:HEAD] = words
    for place in range(BACK):
        rows, columns = WORDS.stop + HEAD * place, HEAD * place
        attention.o_proj.weight[rows : rows + HEAD, columns : columns + HEAD] = torch.eye(HEAD) * EMBEDDED * 0.75


def _find(attention: torch.nn.Module, words: torch.Tensor) -> None:
    """Of three heads with one key: the place after the same token, the same two, the same three."""
    still = torch.tensor([*range(TURNING + 1, HEAD // 2), *range(HEAD // 2 + TURNING + 1, HEAD)])
    turned = [_orthogonal(len(still), HEAD) for _ in range(BACK)]
    before = [slice(WORDS.stop + HEAD * place, WORDS.stop + HEAD * (place + 1)) for place in range(BACK)]
    key = torch.zeros(len(still), words.shape[1])
    for place, weight in enumerate((1.0, 0.8, 0.6)):
        key[:, before[place]] = turned[place] * weight
    attention.k_proj.weight[:HEAD] *= 0.2
    attention.k_proj.weight[still] = key * FIND
    query = turned[0] @ words
    value = torch.zeros_like(words)
    value[:, WORDS] = _orthogonal(HEAD, WORDS.stop - WORDS.start)
    attention.v_proj.weight[:HEAD] = value
    for place in range(BACK):
        if place:
            query[:, before[place - 1]] += turned[place]
        attention.q_proj.weight[HEAD * place + still] = query * FIND
        attention.o_proj.weight[:, HEAD * place : HEAD * (place + 1)] = value.T * EMBEDDED * 1.5


def _orthogonal(rows: int, columns: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(columns, rows))[0].T
