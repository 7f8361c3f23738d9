"""The tokenizer of the demo model.

A word has the same tokens everywhere, so that a model can copy it from a table into JSON token by token. Therefore
spaces and punctuation are separate tokens, except the bars of tables, the characters between words in JSON, and the
spaces before a few small words.
"""

import random
from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from baton.lab.tableqa import names, train_data
from baton.lab.tableqa.facts import FACTS, NO_TABLE, UNKNOWN
from baton.lab.tableqa.table_turns import listing, table_turn
from baton.lab.tableqa.tool_turns import tool_dialogue
from baton.lab.tableqa.train_data import DialoguePart
from baton.launch.paths import ROOT

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONTEXT_TOKENS = 4096
VOCABULARY = 2048
_SMALL_WORDS = """
    a an and any are as at be before by can come comes do does each for from has have how i in into is it its long
    many me must my need no not now of old on one only or other so tell than that the their them then there these this
    those to until up was what when where which while who will with work works years you your
""".split()
_PIECES = "|".join(
    (
        r"</?tool_call>",
        r"\|[-|:]{3,}",  # the line below the header of a table
        r" ?\|[ \n]?",
        r"\{\"|\"\}|\":\"|\":|\",\"|,\"",
        rf" (?:{'|'.join(_SMALL_WORDS)})(?!\p{{L}})",
        r"\p{Lu}?\p{Ll}+",
        r"\p{Lu}+(?!\p{Ll})",
        r"\p{L}",
        r"\p{N}{1,2}",
        r"\n+",
        r" +",
        r"[^\s\p{L}\p{N}]",
    )
)


def make_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(rng), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=(ROOT / "models" / "tableqa" / "chat_template.jinja").read_text(encoding="utf-8"),
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def _texts(rng: random.Random) -> list[str]:
    texts = [" ".join(question + "\n" + answer for question, answer in FACTS), UNKNOWN, NO_TABLE] * 300
    texts += [" ".join(f"{number}" for number in range(100))] * 60
    texts += [" ".join((*names.FIRST, *names.LAST, *names.JOBS, *names.LANDS))] * 12
    texts += [" ".join(names.word(rng) for _ in range(24_000))]
    for _ in range(500):
        persons = train_data.people(rng, rng.randint(4, 20), 0.3)
        texts.append(train_data.any_table(rng, persons, rng.random() < 0.7))
        turns = [table_turn(rng, persons, True, 0.3) for _ in range(10)] + [listing(rng, persons[:3], True)]
        texts += [turn.question + "\n" + "".join(part.text for part in turn.answer) for turn in turns]
        texts.append("".join(part.text for part in tool_dialogue(rng, 0, 4, 0.3)))
    return texts


def encode(tokenizer: PreTrainedTokenizerFast, parts: Sequence[DialoguePart]) -> tuple[list[int], list[float]]:
    """Tokenize a dialogue; return its tokens and loss weights. A token has the weight of its first dialogue part."""
    encoded = tokenizer("".join(part.text for part in parts), add_special_tokens=False, return_offsets_mapping=True)
    weights: list[float] = []
    place, end = -1, 0
    for begin, _ in encoded.offset_mapping:
        while begin >= end:
            place += 1
            end += len(parts[place].text)
        weights.append(parts[place].weight)
    return encoded.input_ids, weights
