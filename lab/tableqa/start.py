"""Weights from which training starts: attention heads that find the row that a question is about, and copy from it.

From random weights a model this small takes millions of tokens until it copies at all, and many more until it goes
from a name in the question to a row, and from there to a cell. So these heads have weights from the start, which
training may change. A token's vector has a slice for each known property (`HeadParts`), and the layers fill them:

1. Three heads copy the three previous tokens to each token. A fourth copies the sum of the pieces of a name nearby.
2. Each token learns its row: the first cell of the last row that began. Tokens after a question learn the name in it.
3. That name is compared with the names at all tokens of the table, so that a token after the question learns the row
   in question. Other heads find an earlier position after the same three tokens, and copy the token there.
4. Heads find an earlier position after the same tokens within the row in question, and copy the token there.
5. After a bar, a head copies the first cell of the row in question. Another head attends to the words that say what
   was asked.
"""

from collections.abc import Sequence

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from baton.lab.tableqa.heads import HEAD, ONE, Heads, balance, turn


class HeadParts:
    """Slices of a token's vector."""

    ONE = slice(0, 1)  # constant, the same for all tokens
    TOKEN = slice(1, 65)  # MARKS of the token itself, then its code
    BEFORE = (slice(65, 97), slice(97, 117), slice(117, 137))  # marks and shortened codes of the three tokens before
    NAME = slice(137, 183)
    ROW = slice(183, 207)  # whether a message began after the last row, then the code of that row
    NEXT = slice(207, 271)  # predicted next token, in the format of TOKEN
    FOUND = slice(271, 288)  # a part of the name in the row that was found


BAR, START, END, NAME_LIKE = range(4)
"""Marks: the token is the bar that begins a row, begins or ends a message, or may be a piece of a name."""
MARKS = 4
CODE_OF_TOKEN = slice(HeadParts.TOKEN.start + MARKS, HeadParts.TOKEN.stop)
CODE_BEFORE = slice(HeadParts.BEFORE[0].start + 3, HeadParts.BEFORE[0].stop)
NO_ROW = slice(HeadParts.ROW.start, HeadParts.ROW.start + 1)
CODE_OF_ROW = slice(HeadParts.ROW.start + 1, HeadParts.ROW.stop)
NAMES_ALIKE = 6.0  # weight of the similarity of two names in the attention logits
ALL = slice(0, HEAD)
AROUND = "According to the table, What is the? How is. Where does, Which of as a me"
ASKING = (
    *(
        " old",
        "age",
        " years",
        "occupation",
        " do",
        "job",
        " work",
        "profession",
        "living",
        " from",
        "country",
        " come",
    ),
    *("live", "Tell", "Describe", "Who", "know", "JSON"),
)
FORM_TEXTS = """
    What is the age of a person as JSON and occupation, country name job profession How old many years now Where do does
    come from Which live living Who Tell me about Describe know you work works for Give Answer in List everyone all
    people table There no According to The assistant user system tools tool that reads helpful You are ID Name Age
    Occupation Country lookup parameters arguments Please Hi And OK
"""


def _mark(part: slice, mark: int) -> slice:
    return slice(part.start + mark, part.start + mark + 1)


def form_tokens(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Return the tokens that are never a piece of a name: words of questions, numbers and punctuation."""
    texts = [*FORM_TEXTS.split(), FORM_TEXTS]
    texts += [
        "|----|------|-----|------------|---------|",
        '{"name":"","age":0,"o":""}',
        "[]<tool_call></tool_call> |\n| - | .,?:'\n",
    ]
    found = {token for text in texts for token in tokenizer(text, add_special_tokens=False).input_ids}
    for token in range(len(tokenizer)):
        text = tokenizer.decode([token])
        if not any(letter.isalpha() for letter in text) and text.isprintable() and "\ufffd" not in text:
            found.add(token)
    return found | set(tokenizer.all_special_ids)


@torch.no_grad()
def prepare(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.normal_(0.0, 0.02)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.1)
        layer.mlp.down_proj.weight.mul_(0.1)
    embedding = model.model.embed_tokens.weight
    embedding.zero_()
    embedding[:, HeadParts.ONE] = 1.0
    shorter = Shorter()
    code = torch.randn(len(embedding), 60)
    code /= code.norm(dim=1, keepdim=True)
    # Numbers get dissimilar codes, since rows are distinguished by the number in the first cell.
    numbers = [
        token for number in range(1, 100) for token in tokenizer(str(number), add_special_tokens=False).input_ids
    ]
    to_row = shorter.row @ shorter.one[3:, MARKS:]
    inverse = torch.linalg.pinv(to_row)
    code[numbers] += (_apart(len(numbers), len(to_row)) - code[numbers] @ to_row.T) @ inverse.T
    embedding[:, HeadParts.TOKEN.start + MARKS : HeadParts.TOKEN.stop] = code / code.norm(dim=1, keepdim=True)
    for token, mark in (("| ", BAR), ("<|im_start|>", START), ("<|im_end|>", END)):
        [place] = tokenizer(token, add_special_tokens=False).input_ids
        embedding[place, HeadParts.TOKEN] = 0.0
        embedding[place, HeadParts.TOKEN.start + mark] = 1.0
    forms = form_tokens(tokenizer)
    names = [token for token in range(len(embedding)) if token not in forms]
    embedding[names, HeadParts.TOKEN.start + NAME_LIKE] = 0.5
    model.lm_head.weight.zero_()
    model.lm_head.weight[:, HeadParts.NEXT] = embedding[:, HeadParts.TOKEN] * 2.0
    model.lm_head.weight[:, HeadParts.NEXT.start + NAME_LIKE] = 0.0
    first, second, third, fourth, fifth = (layer.self_attn for layer in model.model.layers)
    _look_back(first, shorter)
    _rows(second, shorter)
    _compare(third, shorter)
    _in_the_row(fourth, shorter)
    _first_cell(fifth, shorter)
    for attention in (first, second, third, fourth, fifth):
        balance(attention)
    look_at_the_question(model, tokenizer)


class Shorter:
    """Matrices that shorten the codes of the last three tokens; `two` shortens results of `one`, `three` of `two`."""

    def __init__(self) -> None:
        self.one = _marks_and(32, 64, skipped=1)
        self.two = _marks_and(20, 32)
        self.three = _marks_and(20, 20)
        self.row = turn(23, 29)


def _apart(count: int, dimensions: int) -> torch.Tensor:
    """Return vectors of length 1, of which no two are similar."""
    found = torch.nn.functional.normalize(torch.randn(count, dimensions))
    for _ in range(500):
        alike = found @ found.T
        alike.fill_diagonal_(0.0)
        found = torch.nn.functional.normalize(found - 0.5 * alike**3 @ found)
    return found


def _marks_and(rows: int, columns: int, skipped: int = 0) -> torch.Tensor:
    """Return a matrix that keeps the marks bar, start and end, and reduces the dimensions of the code."""
    matrix = torch.zeros(rows, columns)
    matrix[:3, :3] = torch.eye(3)
    matrix[3:, 3 + skipped :] = turn(rows - 3, columns - 3 - skipped)
    return matrix


def _look_back(attention: torch.nn.Module, shorter: Shorter) -> None:
    heads = Heads(attention, size=2**0.5)
    matrices = (shorter.one, shorter.two @ shorter.one, shorter.three @ shorter.two @ shorter.one)
    for kv in range(2):
        heads.value(kv, ALL, HeadParts.TOKEN, torch.eye(64))
    for place, (part, matrix) in enumerate(zip(HeadParts.BEFORE, matrices, strict=True)):
        heads.clear(place)
        heads.near(place, place // 2, (12.0, 12.0, 12.0), place + 1)
        heads.write(place, part, ALL, matrix)
    heads.clear(3)
    heads.near(3, 1, (0.0, 0.0, 10.0, 5.0, 5.0), 6)
    heads.key(1, slice(0, 1), _mark(HeadParts.TOKEN, NAME_LIKE), ONE, 2.0)
    heads.query(3, slice(0, 1), HeadParts.ONE, ONE, 7.0)
    pieces = torch.zeros(46, 64)
    pieces[:, MARKS:] = turn(46, 60)
    heads.write(3, HeadParts.NAME, ALL, pieces * 2.0)


def _rows(attention: torch.nn.Module, shorter: Shorter) -> None:
    heads = Heads(attention, size=2.8)
    recent = (0.0, 0.0, 6.0, 25.0, 30.0, 40.0)
    # Head 0 copies the row: the token after the last bar, or the mark of a message that began after that bar.
    heads.clear(0)
    heads.near(0, 0, recent, 0)
    begins = _mark(HeadParts.TOKEN, START)
    heads.key(0, slice(0, 1), _mark(HeadParts.BEFORE[1], BAR), ONE)
    heads.key(0, slice(0, 1), begins, ONE)
    heads.query(0, slice(0, 1), HeadParts.ONE, ONE, 60.0)
    heads.value(0, slice(0, 29), CODE_BEFORE, torch.eye(29))
    heads.value(0, slice(29, 30), begins, ONE)
    heads.write(0, CODE_OF_ROW, slice(0, 29), shorter.row)
    heads.write(0, NO_ROW, slice(29, 30), ONE)
    # Head 2 copies the name in the question.
    heads.clear(2)
    heads.near(2, 1, recent, 0)
    heads.key(1, slice(0, 1), _mark(HeadParts.TOKEN, END), ONE)
    heads.query(2, slice(0, 1), HeadParts.ONE, ONE, 60.0)
    heads.value(1, slice(0, 46), HeadParts.NAME, torch.eye(46))
    heads.write(2, HeadParts.NAME, slice(0, 46), torch.eye(46) * 2.0)


def _compare(attention: torch.nn.Module, shorter: Shorter) -> None:
    heads = Heads(attention, size=3.5)
    heads.clear(0)
    name = turn(45, 46)
    heads.key(0, slice(0, 45), HeadParts.NAME, name)
    heads.query(0, slice(0, 45), HeadParts.NAME, name, NAMES_ALIKE)
    heads.key(0, slice(45, 46), NO_ROW, ONE)
    heads.query(0, slice(45, 46), HeadParts.ONE, ONE, -40.0)
    heads.value(0, slice(0, 23), CODE_OF_ROW, torch.eye(23))
    heads.value(0, slice(23, 64), HeadParts.NAME, turn(41, 46))
    heads.write(0, CODE_OF_ROW, slice(0, 23), torch.eye(23) * 1.5)
    heads.write(0, HeadParts.FOUND, slice(23, 64), turn(17, 41) * 0.5)
    _copy(heads, shorter, 1, 2, (20.0, 16.0, 12.0))
    _copy(heads, shorter, 1, 3, (20.0, 16.0, 0.0))


def _in_the_row(attention: torch.nn.Module, shorter: Shorter) -> None:
    heads = Heads(attention, size=4.0)
    _copy(heads, shorter, 0, 0, (14.0, 10.0, 0.0), row=14.0)
    _copy(heads, shorter, 0, 1, (14.0, 0.0, 0.0), row=14.0)
    _copy(heads, shorter, 1, 2, (16.0, 13.0, 10.0))


def _first_cell(attention: torch.nn.Module, shorter: Shorter) -> None:
    """Set attention from the bar that begins a quoted row to the first cell of the row in question."""
    heads = Heads(attention, size=6.3)
    heads.clear(0)
    bar = _mark(HeadParts.TOKEN, BAR)
    heads.key(0, slice(0, 23), CODE_OF_ROW, torch.eye(23))
    heads.query(0, slice(0, 23), CODE_OF_ROW, torch.eye(23), 5.0)
    heads.key(0, slice(23, 24), _mark(HeadParts.BEFORE[1], BAR), ONE)
    heads.query(0, slice(23, 24), bar, ONE, 20.0)
    heads.query(0, slice(23, 24), NO_ROW, ONE, 20.0)
    # At other queries, the head attends to a role's name and copies nothing: the token before a role has no code.
    heads.key(0, slice(24, 25), _mark(HeadParts.BEFORE[0], START), ONE)
    heads.query(0, slice(24, 25), HeadParts.ONE, ONE, 32.0)
    heads.value(0, slice(0, 29), CODE_BEFORE, torch.eye(29))
    code = slice(HeadParts.NEXT.start + MARKS, HeadParts.NEXT.stop)
    heads.write(0, code, slice(0, 29), shorter.one[3:, MARKS:].T * 2.0)


@torch.no_grad()
def look_at_the_question(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, size: float = 6.3) -> None:
    """Let a head of the last layer find the word that says what is asked, and copy its code for the layer's MLP."""
    attention = model.model.layers[-1].self_attn
    tokens = model.model.embed_tokens.weight[:, HeadParts.TOKEN]
    asking = [token for word in ASKING for token in tokenizer(word, add_special_tokens=False).input_ids[-1:]]
    wanted = torch.zeros(len(tokens))
    wanted[asking] = 1.0
    weight = torch.ones(len(tokens))
    # These words are in every question and answer: the head must not attend to them.
    weight[tokenizer(AROUND, add_special_tokens=False).input_ids] = 40.0
    weight[asking] = 40.0
    codes = tokens[:, MARKS:]
    squares = (codes * weight[:, None]).T @ codes + 0.3 * torch.eye(60)
    direction = torch.linalg.solve(squares, codes.T @ (weight * wanted))
    heads = Heads(attention, size=size, kv_heads=(1,))
    heads.clear(2)
    heads.near(2, 1, (0.0, 0.0, 2.0, 8.0, 12.0, 12.0), 0)
    heads.key(1, slice(0, 1), CODE_OF_TOKEN, direction[None] * 4.0)
    heads.query(2, slice(0, 1), HeadParts.ONE, ONE, 9.0)
    heads.value(1, ALL, HeadParts.TOKEN, torch.eye(64))
    last = HeadParts.BEFORE[2]
    attention.o_proj.weight[:, 2 * HEAD : 3 * HEAD] = 0.0
    heads.write(2, last, ALL, turn(20, 64))
    balance(attention)


def _copy(heads: Heads, shorter: Shorter, kv: int, head: int, alike: Sequence[float], row: float | None = None) -> None:
    """Make a head copy the token after an earlier occurrence of the last tokens. `alike`: weight of each last token."""
    generator = torch.Generator().manual_seed(kv)
    widths = (18, 14, 14) if row is None else (14, 14, 0)
    now = (shorter.one, shorter.two, shorter.three)
    parts = (HeadParts.TOKEN, *HeadParts.BEFORE[:2])
    heads.clear(head)
    begin = 0
    first = head % 2 == 0
    for width, before, part, matrix, size in zip(widths, HeadParts.BEFORE, parts, now, alike, strict=True):
        if not width:
            continue
        still = slice(begin, begin + width)
        turned = turn(width, before.stop - before.start, generator)
        if first:
            heads.key(kv, still, before, turned)
        heads.query(head, still, part, turned @ matrix, size)
        begin += width
    if row is not None:
        still = slice(begin, begin + 18)
        turned = turn(18, 23, generator)
        if first:
            heads.key(kv, still, CODE_OF_ROW, turned)
        heads.query(head, still, CODE_OF_ROW, turned, row)
    if first:
        heads.value(kv, ALL, HeadParts.TOKEN, torch.eye(64))
    heads.write(head, HeadParts.NEXT, ALL, torch.eye(64) * 1.5)
