"""Judge of undisturbed answers: tokens, length, text and end reason. Independent of the service.

Hugging Face transformers computes the logits of prompt and answer in one float32 pass. Each token of a plain greedy
answer must have the largest logit, and `generate` of transformers must return the same answer. A penalised or sampled
token must be the one that the second sampler draws from these logits. A structured answer must match its schema, regex
or choice.
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

from baton.lab.chaos.checker import ExpectedChoice
from baton.lab.chaos.exactness.second_sampler import Filters, Floats, SampledDraw, adjusted, drawn, uniform_number
from baton.lab.chaos.history import ChaosCase

CHANGES_OF_LOGITS = ("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias")


class OracleDisagrees(Exception):
    """Error: an undisturbed answer is wrong, so it cannot serve as the expected answer of a run."""


class MadeChoice(Protocol):
    """Choice as `baton.client` returns it, without the end token and without the tokens of a stop string."""

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
class OracleTally:
    """Number of judged tokens, by judge. `close`: number of judged tokens with another token within 1e-4."""

    tokens: Counter[str]
    close: Counter[str]

    def __str__(self) -> str:
        kinds = (f"{count} {kind} ({self.close[kind]} close)" for kind, count in sorted(self.tokens.items()))
        return ", ".join(kinds)


def chosen_by(options: Mapping[str, Any]) -> str:
    """Return what judges the tokens of a request: transformers, the second sampler, or a schema, regex or choice."""
    if any(form in options for form in ("json_schema", "regex", "choice")):
        return "by a form"
    if float(options["temperature"]) > 0.0 or any(name in options for name in CHANGES_OF_LOGITS):
        return "by the second sampler"
    return "by transformers"


class Oracle:
    """Judge of answers: Hugging Face transformers, in float32, with the checkpoint that the service serves."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        end = self._model.generation_config.eos_token_id
        self._ends = frozenset(end if isinstance(end, list) else [end])
        self.tally = OracleTally(Counter(), Counter())

    def expect(self, case: ChaosCase, choices: Sequence[MadeChoice]) -> tuple[ExpectedChoice, ...]:
        """Check the undisturbed `choices` and return them as expected answers. Raises: OracleDisagrees."""
        if [each.index for each in choices] != list(range(case.choices)):
            raise OracleDisagrees(f"{case.name}: {len(choices)} choices, not {case.choices}")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # more threads slow a tiny model down
        try:
            expected = tuple(self._expect(case, choice) for choice in choices)
            if chosen_by(case.options) == "by transformers":
                for choice in expected:
                    self._generate(case, choice)
        finally:
            torch.set_num_threads(threads)
        return expected

    def _expect(self, case: ChaosCase, choice: MadeChoice) -> ExpectedChoice:
        token_ids = tuple(choice.token_ids)
        scores, kind = self._scores([*case.prompt, *token_ids])[len(case.prompt) - 1 :], chosen_by(case.options)
        # The oracle does not know which tokens a schema, regex or choice allows: it takes the answer's own tokens.
        draws = [
            SampledDraw(token_id, False)
            if kind == "by a form"
            else self._draw(case, choice.index, token_ids[:offset], scores[offset])
            for offset, token_id in enumerate(token_ids)
        ]
        for offset, draw in enumerate(draws):
            if draw.token_id != token_ids[offset] and not draw.is_close:
                difference = f"choice {choice.index} has {token_ids[offset]} at offset {offset}, not {draw.token_id}"
                raise OracleDisagrees(f"{case.name}: {difference}")
        close = frozenset(offset for offset, draw in enumerate(draws) if draw.is_close)
        self.tally.tokens[kind] += len(token_ids)
        self.tally.close[kind] += len(close)
        if trouble := self._ending(case, choice, scores[-1]):
            raise OracleDisagrees(f"{case.name}: choice {choice.index} {trouble}")
        logprobs = torch.from_numpy(scores[:-1]).log_softmax(-1)[range(len(token_ids)), token_ids].tolist()
        return ExpectedChoice(
            token_ids,
            choice.text,
            str(choice.finish_reason),
            choice.matched_stop,
            tuple(logprobs) if "logprobs" in case.options else (),
            close,
        )

    def _scores(self, token_ids: Sequence[int]) -> Floats:
        """Return the logits for the token after each token of prompt and answer."""
        with torch.inference_mode():
            scores: Floats = self._model(torch.tensor([token_ids])).logits[0].double().numpy()
        return scores

    def _draw(self, case: ChaosCase, choice: int, answer: Sequence[int], scores: Floats) -> SampledDraw:
        """Draw, with the second sampler, the token that follows `answer`."""
        number = uniform_number(int(case.options["seed"]), choice, len(case.prompt) + len(answer))
        return drawn(adjusted(scores, case.prompt, answer, case.options), Filters.of(case.options), number)

    def _ending(self, case: ChaosCase, choice: MadeChoice, scores: Floats) -> str:
        """Return the error in length, text or end reason; empty if there is none.

        `scores`: logits after the last token.
        """
        options, token_ids, reason = case.options, list(choice.token_ids), str(choice.finish_reason)
        stops, most = _stops(options), options["max_tokens"]
        text, before = self._text(token_ids), self._text(token_ids[:-1])
        ends = frozenset() if options.get("ignore_eos", False) else self._ends
        if not ends.isdisjoint(token_ids[:-1]) or any(stop in before for stop in stops):
            return "continues after an end token or stop string"
        if reason == "length":
            if len(token_ids) != most or not ends.isdisjoint(token_ids) or any(stop in text for stop in stops):
                return f"ended by length with {len(token_ids)} tokens; max_tokens is {most}"
            return "" if choice.text == text else f"has the text {choice.text!r}, not {text!r}"
        if reason != "stop" or len(token_ids) > most:
            return f"ended by {reason} with {len(token_ids)} tokens; max_tokens is {most}"
        if chosen_by(options) == "by a form":
            is_right = choice.text == text and _has_form(options, text)
            return "" if is_right else f"has the text {choice.text!r}, which does not match the requested form"
        # The client gets no tokens of the stop string: draw them, to find out where the answer stops.
        while ends.isdisjoint(token_ids) and not any(stop in text for stop in stops):
            if len(token_ids) - len(choice.token_ids) > max(map(len, stops), default=0):
                return f"ended by {reason}, but its next tokens are no stop"
            draw = self._draw(case, choice.index, token_ids, scores)
            if draw.is_close:
                return ""
            token_ids.append(draw.token_id)
            text = self._text(token_ids)
            scores = self._scores([*case.prompt, *token_ids])[-1]
        stop = _first(stops, text)
        right = text if stop is None else text[: text.find(stop)]
        if choice.text != right or (stop is not None and choice.matched_stop != stop):
            return f"has the text {choice.text!r} and matched {choice.matched_stop!r}, not {right!r} and {stop!r}"
        return ""

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _generate(self, case: ChaosCase, expected: ExpectedChoice) -> None:
        """Compare the expected answer with that of transformers' `generate`. Raises: OracleDisagrees."""
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
        if expected.reason == "stop":  # the client gets no tokens of the stop string
            stop = _first(_stops(options), self._text(made))
            if stop is None and made[-1] not in self._ends:
                raise OracleDisagrees(f"{case.name}: `generate` does not stop within {len(made)} tokens")
            left_out = made[len(expected.token_ids) :]
            made = made[: len(expected.token_ids)] if len(left_out) <= len(stop or " ") else made
        pairs = enumerate(zip_longest(made, expected.token_ids))
        differs = next((offset for offset, pair in pairs if pair[0] != pair[1]), None)
        if differs is not None and differs not in expected.close:
            token = made[differs] if differs < len(made) else "no token"
            raise OracleDisagrees(f"{case.name}: `generate` returns {token} at offset {differs}")


def _stops(options: Mapping[str, Any]) -> list[str]:
    given = options.get("stop", ())
    return [given] if isinstance(given, str) else list(given)


def _first(stops: Sequence[str], text: str) -> str | None:
    """Return the stop string that occurs first in `text`; None if `text` contains none."""
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
