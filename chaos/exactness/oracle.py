"""Whether an undisturbed answer is right: its tokens, its length, its text and how it ended. Knows no service.

An answer is fed to transformers in fp32 in one pass behind its prompt. Each token of a plain greedy answer is
transformers' own choice, and `generate` must make the same answer. Penalised and sampled tokens are what the second
sampler draws from transformers' logits. What a form allows is neither's choice: such an answer must have its form.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.chaos.checker import ExpectedChoice
from baton.chaos.exactness.second_sampler import Draw, Filters, Floats, adjusted, drawn, uniform_number
from baton.chaos.history import Case

CHANGES_OF_LOGITS = ("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias")


class OracleDisagrees(Exception):
    """An undisturbed answer is not what it must be: no run can be judged by it."""


class MadeChoice(Protocol):
    """As of `baton.client`. The token that completes a stop text, or ends the answer, may be left out."""

    @property
    def index(self) -> int: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def matched_stop(self) -> str | int | None: ...


@dataclass(slots=True)
class Tally:
    """Tokens by who chose them, and those that were close: another one was as good as they, within 1e-4."""

    tokens: Counter[str]
    close: Counter[str]

    def __str__(self) -> str:
        kinds = (f"{count} {kind} ({self.close[kind]} close)" for kind, count in sorted(self.tokens.items()))
        return ", ".join(kinds)


def chosen_by(options: Mapping[str, Any]) -> str:
    """Who says which tokens are right."""
    if any(form in options for form in ("json_schema", "regex", "choice")):
        return "by a form"
    if float(options["temperature"]) > 0.0 or any(name in options for name in CHANGES_OF_LOGITS):
        return "by the second sampler"
    return "by transformers"


class Oracle:
    """transformers on the checkpoint that is served."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        end = self._model.generation_config.eos_token_id
        self._ends = frozenset(end if isinstance(end, list) else [end])
        self.tally = Tally(Counter(), Counter())

    def expect(self, case: Case, choices: Sequence[MadeChoice]) -> tuple[ExpectedChoice, ...]:
        """The undisturbed `choices` as what every later answer has to equal. Raises: OracleDisagrees."""
        if [each.index for each in choices] != list(range(case.choices)):
            raise OracleDisagrees(f"{case.name}: {len(choices)} choices, not {case.choices}")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the model is tiny: more would mostly wait for each other
        try:
            expected = tuple(self._expect(case, choice) for choice in choices)
            if chosen_by(case.options) == "by transformers":
                for choice in expected:
                    self._generate(case, choice)
        finally:
            torch.set_num_threads(threads)
        return expected

    def _expect(self, case: Case, choice: MadeChoice) -> ExpectedChoice:
        token_ids = tuple(choice.token_ids)
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*case.prompt, *token_ids]])).logits[0, len(case.prompt) - 1 :]
        scores, kind = logits.double().numpy(), chosen_by(case.options)
        # What the form allows is not the model's to say: only this answer itself is known.
        draws = [
            Draw(token_id, False) if kind == "by a form" else self._draw(case, choice, offset, scores[offset])
            for offset, token_id in enumerate(token_ids)
        ]
        for offset, draw in enumerate(draws):
            if draw.token_id != token_ids[offset] and not draw.is_close:
                difference = f"choice {choice.index} has {token_ids[offset]} at offset {offset}, not {draw.token_id}"
                raise OracleDisagrees(f"{case.name}: {difference}")
        close = frozenset(offset for offset, draw in enumerate(draws) if draw.is_close)
        self.tally.tokens[kind] += len(token_ids)
        self.tally.close[kind] += len(close)
        following = None if kind == "by a form" else self._draw(case, choice, len(token_ids), scores[-1])
        if trouble := self._ending(case.options, choice, following):
            raise OracleDisagrees(f"{case.name}: choice {choice.index} {trouble}")
        logprobs = logits[:-1].log_softmax(-1)[range(len(token_ids)), token_ids].tolist()
        return ExpectedChoice(
            token_ids,
            choice.text,
            str(choice.finish_reason),
            choice.matched_stop,
            tuple(logprobs) if "logprobs" in case.options else (),
            close,
        )

    def _draw(self, case: Case, choice: MadeChoice, offset: int, scores: Floats) -> Draw:
        options = case.options
        number = uniform_number(int(options["seed"]), choice.index, len(case.prompt) + offset)
        before = choice.token_ids[:offset]
        return drawn(adjusted(scores, case.prompt, before, options), Filters.of(options), number)

    def _ending(self, options: Mapping[str, Any], choice: MadeChoice, following: Draw | None) -> str:
        """What is wrong with its length, its text or the reason of its end; empty where nothing is.

        `following`: the token after the last one; None: not known.
        """
        token_ids, reason, stops = list(choice.token_ids), str(choice.finish_reason), options.get("stop", ())
        stops = [stops] if isinstance(stops, str) else list(stops)
        text, before = self._text(token_ids), self._text(token_ids[:-1])
        may_end = not options.get("ignore_eos", False)
        if may_end and not self._ends.isdisjoint(token_ids[:-1]):
            return "continues after an end-of-sequence token"
        if any(stop in before for stop in stops):
            return "continues after a stop text"
        has_end, has_stop = may_end and token_ids[-1:] != [] and token_ids[-1] in self._ends, _first(stops, text)
        if reason == "length":
            if len(token_ids) != options["max_tokens"] or has_end or has_stop is not None:
                return f"has {len(token_ids)} tokens and ended for its length, which is {options['max_tokens']}"
            return "" if choice.text == text else f"has the text {choice.text!r}, not {text!r}"
        if reason != "stop" or len(token_ids) > options["max_tokens"]:
            return f"ended with {reason} after {len(token_ids)} tokens of {options['max_tokens']}"
        if following is None:
            is_right = choice.text == text and _has_form(options, text)
            return "" if is_right else f"has the text {choice.text!r}, which has not its form"
        if not has_end and has_stop is None:  # the token that ended it was left out
            if following.is_close:
                return ""
            has_end = may_end and following.token_id in self._ends
            text = self._text([*token_ids, following.token_id])
            has_stop = _first(stops, text)
        if has_stop is None:
            return "" if has_end and choice.text == text else f"ended with {reason}, and its next token ends nothing"
        right = text[: text.find(has_stop)]
        if (choice.text, choice.matched_stop) != (right, has_stop):
            return f"has the text {choice.text!r} and stopped at {choice.matched_stop!r}, not {right!r} at {has_stop!r}"
        return ""

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _generate(self, case: Case, expected: ExpectedChoice) -> None:
        """Compares with the whole answer that `generate` makes. Raises: OracleDisagrees."""
        tokens, options = torch.tensor([case.prompt]), case.options
        stopping = {"stop_strings": options["stop"], "tokenizer": self.tokenizer} if "stop" in options else {}
        with torch.inference_mode():
            answer = self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=options["max_tokens"],
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None if options.get("ignore_eos", False) else sorted(self._ends),
                **stopping,
            )
        made = answer[0, len(case.prompt) :].tolist()
        if expected.reason == "stop" and len(made) == len(expected.token_ids) + 1:
            made.pop()  # the token that ended it, which is not given out
        pairs = enumerate(zip_longest(made, expected.token_ids))
        differs = next((offset for offset, pair in pairs if pair[0] != pair[1]), None)
        if differs is not None and differs not in expected.close:
            token = made[differs] if differs < len(made) else "no token"
            raise OracleDisagrees(f"{case.name}: generate makes {token} at offset {differs}")


def _first(stops: Sequence[str], text: str) -> str | None:
    """The stop text that comes first."""
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    return min(found)[1] if found else None


def _has_form(options: Mapping[str, Any], text: str) -> bool:
    if "choice" in options:
        return text in options["choice"]
    if "regex" in options:
        return re.fullmatch(options["regex"], text) is not None
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and value.keys() >= set(json.loads(options["json_schema"]).get("required", ()))
