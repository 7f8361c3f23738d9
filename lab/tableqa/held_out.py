"""Accuracy of the demo model on people with names outside the training data.

    python -m baton.lab.tableqa.held_out [--model FOLDER] [--each 50] [--seed 1] [--wrong] [--transformers]

Each answer is greedy and comes from Baton's engine, offline, through chat template, structured output and tool-call
parser. With --transformers it comes from transformers.generate, and questions that need structured output
are left out.
"""

import argparse
import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers

from baton.engine.offline.llm import LLM
from baton.engine.offline.params import SamplingParams, StructuredOutputsParams
from baton.lab.tableqa.held_out_cases import KINDS, HeldOutCase, make_cases
from baton.launch.paths import ROOT
from baton.router.http.messages import ChatRequest
from baton.router.http.requests import call_of, chat_request
from baton.router.model.served_model import TokenizerWorker, load_tokenizer
from baton.router.public.access import Caller
from baton.router.public.chat import ReadChat
from baton.router.types.request import ChatPrompt
from baton.text.output.pieces import CallArguments, CallStart
from baton.text.output.thoughts import OutputParser

HERE = ROOT / "models" / "tableqa"
ANSWER_TOKENS = 1200
KV_MEMORY_BYTES = 128 << 20
Answering = Callable[[Sequence[HeldOutCase]], Iterator[str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(HERE))
    parser.add_argument("--each", type=int, default=50, help="questions of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--wrong", action="store_true", help="print wrong answers")
    parser.add_argument("--transformers", action="store_true")
    asked = parser.parse_args()
    answers = _transformers(asked.model, asked.dtype) if asked.transformers else _baton(asked.model, asked.dtype)
    right = total = 0
    for kind in asked.kinds:
        cases = make_cases(kind, asked.each, asked.seed)
        if asked.transformers and _forced(cases[0]):
            continue
        found = list(zip(cases, answers(cases), strict=True))
        wrong = [(case, answer) for case, answer in found if not case.right(answer)]
        right, total = right + len(found) - len(wrong), total + len(found)
        print(f"{kind:15} {len(found) - len(wrong):4} of {len(found)}", flush=True)
        for case, answer in wrong if asked.wrong else ():
            print(f"    {case.request['messages'][-1]['content']!r} -> {answer!r}")
    print(f"{'all':15} {right:4} of {total}: {100 * right / total:.1f} %")


def _baton(model: str, dtype: str) -> Answering:
    llm = LLM(model, dtype=dtype, kv_memory=KV_MEMORY_BYTES, quiet=True)
    reader = load_tokenizer(Path(model))

    def answers(cases: Sequence[HeldOutCase]) -> Iterator[str]:
        prompts, sampling, parsers = [], [], []
        for case in cases:
            read = _read(case, reader)
            prompts.append({"prompt_token_ids": _prompt(llm.get_tokenizer(), case, _shown(read))})
            form = read.request.sampling.structured
            held = None if form is None else StructuredOutputsParams.from_output(form)
            sampling.append(SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, structured_outputs=held))
            parsers.append(read.reader())
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        for output, parser in zip(outputs, parsers, strict=True):
            yield _said(output.outputs[0].text, parser)

    return answers


def _transformers(model: str, dtype: str) -> Answering:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, reader = AutoTokenizer.from_pretrained(model), load_tokenizer(Path(model))
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))

    def answers(cases: Sequence[HeldOutCase]) -> Iterator[str]:
        for case in cases:
            read = _read(case, reader)
            prompt = torch.tensor([_prompt(tokenizer, case, _shown(read))])
            with torch.inference_mode():
                made = loaded.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=ANSWER_TOKENS,
                    do_sample=False,
                    pad_token_id=tokenizer.pad_token_id,
                )
            text = tokenizer.decode(made[0, prompt.shape[1] :], skip_special_tokens=True)
            yield _said(text, read.reader())

    return answers


def _read(case: HeldOutCase, reader: TokenizerWorker) -> ReadChat:
    message = ChatRequest.model_validate(case.request)
    return asyncio.run(chat_request(message, call_of(Headers(), Caller()), reader))


def _shown(read: ReadChat) -> Sequence[Mapping[str, Any]]:
    """Return the tools in the form that the chat template gets."""
    prompt = read.request.prompt
    return prompt.tools if isinstance(prompt, ChatPrompt) else ()


def _forced(case: HeldOutCase) -> bool:
    choice = case.request.get("tool_choice", "auto")
    return "response_format" in case.request or choice != "auto"


def _prompt(tokenizer: Any, case: HeldOutCase, tools: Sequence[Any]) -> list[int]:
    messages = []
    for message in case.request["messages"]:
        called = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        messages.append({**message, **({"tool_calls": called} if called else {})})
    text = tokenizer.apply_chat_template(
        messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _said(text: str, parser: OutputParser) -> str:
    """Return the text, or its tool calls as `[[name, arguments], ...]`."""
    names: list[str] = []
    arguments: list[str] = []
    for piece in [*parser.push(text, 0), *parser.finish()]:
        if isinstance(piece, CallStart):
            names.append(piece.name)
            arguments.append("")
        elif isinstance(piece, CallArguments):
            arguments[piece.index] += piece.arguments
    if not names:
        return text
    return f"[{', '.join(f'[{json.dumps(name)}, {each}]' for name, each in zip(names, arguments, strict=True))}]"


if __name__ == "__main__":
    main()
