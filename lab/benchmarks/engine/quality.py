"""Quality against bits: perplexity and exact answers, next to bytes of weights and KV.

    .venv/bin/python -m baton.lab.benchmarks.engine.quality [--model MODEL] [--quantize int8 ...] [--beside MODEL ...]
                                         [--kv-cache-dtype fp8_e4m3 int8 ...] [--tokens 8192] [--json FILE]

MODEL is a checkpoint's folder, a GGUF file or the name of a model; by default smollm2, or the demo model where smollm2
cannot be fetched. A GGUF file is first dequantised to float32, the basis of all losses. `--beside` measures other files
of the same model as they are, for example those that llama-quantize wrote.

Every model gets English prose, the help topics of Python's standard library, in windows of 512 tokens: perplexity, and
its loss against the first setting, with the standard error of the loss over tokens.

The demo model also gets questions and texts of lab/tableqa/train_data.py, from seeds that training did not use:

* exact answers: greedy answers to 4 questions about each table of 60 rows (about 830 tokens). An answer counts only if
it is completely right: the quoted row and the sentence.

* perplexity: exp of the mean negative log-likelihood of the right answers in dialogues (a table of 30 to 60 rows and 6
questions; a quarter asks about the server). It is measured for complete answers, and for the table's cells in them.

Bytes of KV per token include scales; bytes of weights are those of the loaded model's tensors.
"""

import dataclasses
import math
import pydoc_data.topics
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.engine.offline.llm import LLM
from baton.engine.offline.params import SamplingParams
from baton.lab.benchmarks.engine.plain_copy import plain_copy
from baton.lab.report.result import DEMO, ENGINE, make_result, read_arguments, write_result
from baton.lab.tableqa.tokens import encode
from baton.lab.tableqa.train_data import dialogue, people, question_and_answer, table
from baton.text.gguf.folder import folder_of
from baton.text.gguf.header import SUFFIX
from baton.text.named_models import NAMED, NotFetched, fetch_named

QUESTION_SEED, DIALOGUE_SEED = 100_001, 100_002
ROWS, QUESTIONS_PER_TABLE, QUESTIONS_PER_DIALOGUE = 60, 4, 6
ANSWER_TOKENS = 64
KV_MEMORY_BYTES = 64 << 20
WINDOW_TOKENS = 512


@dataclass(frozen=True)
class QualitySetting:
    dtype: str
    kv_cache_dtype: str  # auto: same as dtype
    quantization: str | None = None


@dataclass(frozen=True)
class Answers:
    perplexity: float
    cell_perplexity: float
    exact: int
    asked: int


@dataclass(frozen=True)
class Quality:
    setting: QualitySetting
    kv_token_bytes: int
    weight_bytes: int
    tokens: int  # tokens of prose with a log-probability
    perplexity: float  # of prose
    loss_percent: float  # increase of this perplexity over that of the first setting
    loss_error_percent: float  # standard error of the loss
    answers: Answers | None  # of the demo model


@dataclass(frozen=True)
class Question:
    messages: list[dict[str, str]]
    answer: str


@dataclass(frozen=True)
class Dialogue:
    token_ids: list[int]
    weights: list[float]  # training weight of each token: 0 if the model does not write it, 1 in a table cell


def main() -> None:
    arguments = read_arguments(
        __doc__,
        model="",
        beside=([], "other files of the same model, measured as they are"),
        kv_cache_dtype=["fp8_e4m3", "fp8_e5m2", "int8"],
        quantize=(["int8", "fp8", "int4"], "formats of weights, as in `baton up --quantize`"),
        tokens=(8192, "tokens of prose"),
        questions=200,
        dialogues=60,
    )
    base_setting = QualitySetting("float32", "auto")
    settings = [base_setting, *(QualitySetting("float32", "auto", name) for name in arguments.quantize)]
    settings += [QualitySetting("float32", name) for name in arguments.kv_cache_dtype]
    settings += [QualitySetting("float32", "int8", name) for name in arguments.quantize[:1] if arguments.kv_cache_dtype]
    settings += [QualitySetting("bfloat16", "auto")]
    print(HEADING, flush=True)
    qualities: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = find_model(arguments.model, Path(scratch))
        counts = (arguments.questions, arguments.dialogues) if model == DEMO else None
        measured = [(str(model), setting, "") for setting in settings]
        measured[1:1] = [(str(folder_of(Path(each))), base_setting, Path(each).name) for each in arguments.beside]
        base = None
        for folder, setting, file in measured:
            found, logprobs = measure(folder, setting, arguments.tokens, base, counts)
            base = base or logprobs
            print(as_row(found, file), flush=True)
            qualities[file or " ".join(filter(None, dataclasses.astuple(setting)))] = dataclasses.asdict(found)
            write_result(arguments.json, make_result(ENGINE, [qualities], None, model=model.name))


def find_model(wanted: str, scratch: Path) -> Path:
    """Return the folder of a plain checkpoint; one that is dequantised is written to `scratch`."""
    try:
        file = fetch_named(wanted or "smollm2") if not wanted or wanted in NAMED else Path(wanted)
    except NotFetched as error:
        print(f"measuring the demo model instead: {error}", flush=True)
        return DEMO
    return plain_copy(file, scratch / file.stem) if file.suffix == SUFFIX else file


def measure(
    model: str, setting: QualitySetting, tokens: int, base: Sequence[float] | None, counts: tuple[int, int] | None
) -> tuple[Quality, list[float]]:
    """Measure a setting; return its quality and the log-probabilities of prose.

    base: log-probabilities of the first setting; None: this is the first one. counts: questions and dialogues.
    """
    llm = LLM(model, kv_memory=KV_MEMORY_BYTES, quiet=True, **dataclasses.asdict(setting))
    logprobs = prose_logprobs(llm, tokens)
    lost = [before - now for before, now in zip(base or logprobs, logprobs, strict=True)]
    quality = Quality(
        setting,
        llm.sizing.token_bytes,
        held_bytes(llm._engine.runner._model),
        len(logprobs),
        _perplexity(logprobs),
        100 * math.expm1(statistics.fmean(lost)),
        100 * statistics.stdev(lost) / math.sqrt(len(lost)),
        None if counts is None else measure_answers(llm, *counts),
    )
    return quality, logprobs


def prose_logprobs(llm: LLM, tokens: int) -> list[float]:
    """Return the log-probability of each token of prose but the first one of each window."""
    prose = "".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    token_ids = llm.get_tokenizer().encode(prose)[:tokens]
    windows = [token_ids[start : start + WINDOW_TOKENS] for start in range(0, len(token_ids), WINDOW_TOKENS)]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    outputs = llm.generate(windows, params, use_tqdm=False)
    found = []
    for window, output in zip(windows, outputs, strict=True):
        given = zip(window, output.prompt_logprobs or (), strict=True)
        found += [logprobs[token_id].logprob for token_id, logprobs in given if logprobs is not None]
    return found


def measure_answers(llm: LLM, questions: int, dialogues: int) -> Answers:
    answer, cell = perplexities(llm, make_dialogues(llm.get_tokenizer(), dialogues))
    asked = make_questions(questions)
    return Answers(answer, cell, exact_answers(llm, asked), len(asked))


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
    """Return the perplexity of the model's answers, and that of the table cells in these answers."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    outputs = llm.generate([each.token_ids for each in dialogues], params, use_tqdm=False)
    answers: list[float] = []
    cells: list[float] = []
    for each, output in zip(dialogues, outputs, strict=True):
        for token_id, weight, given in zip(each.token_ids, each.weights, output.prompt_logprobs or (), strict=True):
            if given is not None and weight > 0:  # the first token has no log-probability
                answers.append(given[token_id].logprob)
                if weight == 1:
                    cells.append(given[token_id].logprob)
    return _perplexity(answers), _perplexity(cells)


def held_bytes(model: object) -> int:
    """Return the bytes of all tensors of a model that consists of dataclasses, each counted once."""
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
    "| computed in | weights | bytes | KV | bytes per token | perplexity of prose | loss | of answers | of cells | "
    "exact answers |\n|---|---|---|---|---|---|---|---|---|---|"
)


def as_row(found: Quality, file: str = "") -> str:
    setting, answers = found.setting, found.answers
    cells = (
        setting.dtype,
        file or setting.quantization or setting.dtype,
        f"{found.weight_bytes:,}",
        setting.dtype if setting.kv_cache_dtype == "auto" else setting.kv_cache_dtype,
        f"{found.kv_token_bytes:,}",
        f"{found.perplexity:.4f}",
        f"{found.loss_percent:+.2f} ± {found.loss_error_percent:.2f} %",
        *(("", "", "") if answers is None else (f"{answers.perplexity:.5f}", f"{answers.cell_perplexity:.5f}")),
        *(() if answers is None else (f"{answers.exact} of {answers.asked}",)),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
