"""The example questions of the page, asked of the demo model."""

import json
import re
from pathlib import Path

from baton.engine import LLM, SamplingParams
from baton.router.http.page.files import FOLDER

MODEL = Path(__file__).parents[3] / "models" / "tableqa"


def test_demo_model_answers_every_example_right() -> None:
    source = (FOLDER / "examples.js").read_text()
    listed = re.search(r"DEMO = (\[.*?\]);", source, re.DOTALL)
    table = re.search(r"TABLE = `(.*?)`;", source, re.DOTALL)
    assert listed is not None
    assert table is not None
    examples = json.loads(listed[1])
    systems = {True: [{"role": "system", "content": table[1]}], False: []}
    conversations = [[*systems[each["table"]], {"role": "user", "content": each["question"]}] for each in examples]
    llm = LLM(str(MODEL))

    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=256), use_tqdm=False)

    answers = [output.outputs[0] for output in outputs]
    wrong = {
        each["question"]: answer.text
        for each, answer in zip(examples, answers, strict=True)
        if each["answer"] not in answer.text or answer.finish_reason != "stop"
    }
    assert len(examples) >= 4
    assert wrong == {}
