"""What numbers of fewer bits cost in answers: perplexity and exact answers of the demo model, beside memory.

    .venv/bin/python -m baton.lab.benchmarks.engine.quality [--kv-cache-dtype fp8_e4m3 int8 ...] [--quantize int8 ...]
                                         [--json FILE]

Each setting answers the same questions and is given the same texts, all made by lab/tableqa/train_data.py from
seeds that training never saw:

* exact answers: greedy, each question about one person of a table of 60 rows (some 830 tokens, about the longest of
  training), 4 questions to a table. An answer counts only if all of it is right: the quoted row, then the sentence.
* perplexity: exp of the mean negative log-likelihood of what the model says in dialogues (a table of 30 to 60 rows and
  6 questions; in a quarter of them questions about the server instead), the right answers given. Of all of it; and of
  the cells alone, which only the table can tell. What others say is random names, of which the model knows nothing.

Bytes of KV per token count scales; bytes of weights are of the tensors that the loaded model holds.
"""

import dataclasses
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.engine.offline.llm import LLM
from baton.engine.offline.params import SamplingParams
from baton.lab.report.result import DEMO, read_arguments, write_result
from baton.lab.tableqa.tokens import encode
from baton.lab.tableqa.train_data import dialogue, people, question_and_answer, table

QUESTION_SEED, DIALOGUE_SEED = 100_001, 100_002
ROWS, QUESTIONS_PER_TABLE, QUESTIONS_PER_DIALOGUE = 60, 4, 6
ANSWER_TOKENS = 64
KV_MEMORY_BYTES = 64 << 20


@dataclass(frozen=True)
class Setting:
    dtype: str
    kv_cache_dtype: str  # auto: as dtype
    quantization: str | None = None


@dataclass(frozen=True)
class Quality:
    setting: Setting
    kv_token_bytes: int
    weight_bytes: int
    answer_perplexity: float
    cell_perplexity: float
    exact: int
    asked: int


@dataclass(frozen=True)
class Question:
    messages: list[dict[str, str]]
    answer: str


@dataclass(frozen=True)
class Dialogue:
    token_ids: list[int]
    weights: list[float]  # of each token in training: 0 is not the model's, 1 is a cell of the table


def main() -> None:
    arguments = read_arguments(
        __doc__,
        model=str(DEMO),
        kv_cache_dtype=["fp8_e4m3", "fp8_e5m2", "int8"],
        quantize=([], "formats of weights, as in `baton up --quantize`"),
        questions=200,
        dialogues=60,
    )
    settings = [Setting("bfloat16", "auto"), Setting("float32", "auto")]
    settings += [Setting("float32", name) for name in arguments.kv_cache_dtype]
    settings += [Setting("float32", "auto", name) for name in arguments.quantize]
    settings += [Setting("float32", "int8", name) for name in arguments.quantize[:1]]
    print(HEADING, flush=True)
    found = []
    for setting in settings:
        found.append(measure(arguments.model, setting, arguments.questions, arguments.dialogues))
        print(as_row(found[-1]), flush=True)
    qualities = [dataclasses.asdict(quality) for quality in found]
    write_result(arguments.json, {"model": Path(arguments.model).name, "qualities": qualities})


def measure(model: str, setting: Setting, questions: int, dialogues: int) -> Quality:
    llm = LLM(model, kv_memory=KV_MEMORY_BYTES, quiet=True, **dataclasses.asdict(setting))
    answer, cell = perplexities(llm, make_dialogues(llm.get_tokenizer(), dialogues))
    asked = make_questions(questions)
    return Quality(
        setting,
        llm.sizing.token_bytes,
        held_bytes(llm._engine.runner._model),
        answer,
        cell,
        exact_answers(llm, asked),
        len(asked),
    )


def make_questions(count: int) -> list[Question]:
    draw = random.Random(QUESTION_SEED)
    made: list[Question] = []
    while len(made) < count:
        persons = people(draw, ROWS)
        for person in draw.sample(persons, QUESTIONS_PER_TABLE):
            question, parts = question_and_answer(draw, person, True)
            messages = [{"role": "system", "content": table(persons)}, {"role": "user", "content": question}]
            made.append(Question(messages, "".join(part.text for part in parts)))
    return made[:count]


def make_dialogues(tokenizer: Any, count: int) -> list[Dialogue]:
    draw = random.Random(DIALOGUE_SEED)
    made = []
    for _ in range(count):
        parts = dialogue(draw, draw.randint(ROWS // 2, ROWS), QUESTIONS_PER_DIALOGUE)
        made.append(Dialogue(*encode(tokenizer, parts)))
    return made


def exact_answers(llm: LLM, questions: Sequence[Question]) -> int:
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0)
    outputs = llm.chat([question.messages for question in questions], params, use_tqdm=False)
    return sum(output.outputs[0].text == asked.answer for output, asked in zip(outputs, questions, strict=True))


def perplexities(llm: LLM, dialogues: Sequence[Dialogue]) -> tuple[float, float]:
    """Of what the model says, and of the cells in it."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    outputs = llm.generate([each.token_ids for each in dialogues], params, use_tqdm=False)
    answers: list[float] = []
    cells: list[float] = []
    for each, output in zip(dialogues, outputs, strict=True):
        for token_id, weight, given in zip(each.token_ids, each.weights, output.prompt_logprobs or (), strict=True):
            if given is not None and weight > 0:  # the first token has none
                answers.append(given[token_id].logprob)
                if weight == 1:
                    cells.append(given[token_id].logprob)
    return _perplexity(answers), _perplexity(cells)


def held_bytes(model: object) -> int:
    """Of all tensors that a model of dataclasses holds, each counted once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in _tensors(model)}.values())


def _tensors(held: object) -> Iterator[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, tuple | list):
        for each in held:
            yield from _tensors(each)
    elif dataclasses.is_dataclass(held):
        for field in dataclasses.fields(held):
            yield from _tensors(getattr(held, field.name))


def _perplexity(logprobs: Sequence[float]) -> float:
    return math.exp(-sum(logprobs) / len(logprobs))


HEADING = (
    "| computed in | weights | bytes | KV | bytes per token | perplexity of answers | of cells | exact answers |\n"
    "|---|---|---|---|---|---|---|---|"
)


def as_row(found: Quality) -> str:
    setting = found.setting
    cells = (
        setting.dtype,
        setting.quantization or setting.dtype,
        f"{found.weight_bytes:,}",
        setting.dtype if setting.kv_cache_dtype == "auto" else setting.kv_cache_dtype,
        f"{found.kv_token_bytes:,}",
        f"{found.answer_perplexity:.5f}",
        f"{found.cell_perplexity:.5f}",
        f"{found.exact} of {found.asked}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
