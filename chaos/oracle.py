"""Whether an undisturbed answer is the one that transformers gives in fp32. Needs torch; knows no service.

An answer is fed to transformers in one pass behind its prompt, and each of its tokens is held against what the model
and the reference sampler choose in that place: where all are the same, token by token, so is the whole answer. For
greedy answers `generate` itself is asked too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from baton.chaos.checker import ExpectedChoice
from baton.chaos.history import Case
from baton.client import Choice
from baton.engine.request import uniform
from baton.kernels.reference import sample_tokens
from baton.kernels.sampling import no_samples

CLOSE = 1e-4


class OracleDisagrees(Exception):
    """An undisturbed answer is not what transformers gives: no run can be judged by it."""


@dataclass(frozen=True, slots=True)
class _Place:
    token_id: int
    is_close: bool


class Oracle:
    """transformers on the checkpoint that is served."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def expect(self, case: Case, choices: Sequence[Choice]) -> tuple[ExpectedChoice, ...]:
        """The undisturbed `choices` as what every later answer has to equal. Raises: OracleDisagrees."""
        return tuple(self._expect(case, choice) for choice in choices)

    def generates(self, case: Case, expected: ExpectedChoice) -> None:
        """By `generate`; for plain greedy cases. Raises: OracleDisagrees."""
        tokens = torch.tensor([case.prompt])
        with torch.inference_mode():
            answer = self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=len(expected.token_ids),
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        made = answer[0, len(case.prompt) :].tolist()
        pairs = enumerate(zip(made, expected.token_ids, strict=True))
        differs = next((offset for offset, pair in pairs if pair[0] != pair[1]), None)
        if differs is not None and differs not in expected.close:
            raise OracleDisagrees(f"{case.name}: generate makes {made[differs]} at offset {differs}")

    def _expect(self, case: Case, choice: Choice) -> ExpectedChoice:
        token_ids = choice.token_ids
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*case.prompt, *token_ids]])).logits[0, len(case.prompt) - 1 : -1]
        if case.has_form:  # what the form allows is not transformers' to say: only this answer itself is known
            places = [_Place(token_id, False) for token_id in token_ids]
        else:
            places = [self._place(case, choice, offset, row) for offset, row in enumerate(logits)]
        for offset, place in enumerate(places):
            if place.token_id != token_ids[offset] and not place.is_close:
                difference = f"choice {choice.index} has {token_ids[offset]} at offset {offset}, not {place.token_id}"
                raise OracleDisagrees(f"{case.name}: {difference}")
        logprobs = tuple(float(row.log_softmax(-1)[token]) for row, token in zip(logits, token_ids, strict=True))
        return ExpectedChoice(
            token_ids,
            choice.text,
            choice.finish_reason.value,
            choice.matched_stop,
            logprobs if "logprobs" in case.options else (),
            frozenset(offset for offset, place in enumerate(places) if place.is_close),
        )

    def _place(self, case: Case, choice: Choice, offset: int, logits: torch.Tensor) -> _Place:
        options = case.options
        adjusted = _penalised(logits, case, choice.token_ids[:offset])
        temperature = float(options["temperature"])
        if temperature == 0:
            best = adjusted.topk(2)
            margin = float(best.values[0] - best.values[1])
            return _Place(int(best.indices[0]), margin < CLOSE)
        number = uniform(int(options["seed"]), choice.index, len(case.prompt) + offset)
        top_k, top_p = int(options.get("top_k", 0)), float(options.get("top_p", 1.0))
        # This very draw, then its neighbours: a token that any of them changes is close to a boundary.
        draws = [(number, top_p), (number - CLOSE, top_p), (number + CLOSE, top_p)]
        draws += [(number, top_p - CLOSE), (number, min(1.0, top_p + CLOSE))] if top_p < 1 else []
        found = no_samples(len(draws), adjusted.device)
        sample_tokens(
            adjusted.expand(len(draws), -1),
            torch.full((len(draws),), temperature),
            torch.full((len(draws),), top_k),
            torch.tensor([share for _, share in draws], dtype=torch.float64),
            torch.tensor([min(max(each, 0.0), 1 - 1e-12) for each, _ in draws], dtype=torch.float64),
            may_ban=True,
            out=found,
        )
        drawn = found.token_ids.tolist()
        ranked = adjusted.topk(top_k + 1).values if top_k else None
        tied = ranked is not None and float(ranked[-2] - ranked[-1]) < CLOSE
        return _Place(drawn[0], tied or len(set(drawn)) > 1)


def _penalised(logits: torch.Tensor, case: Case, before: Sequence[int]) -> torch.Tensor:
    """As transformers' repetition penalty over prompt and answer, and OpenAI's two over the answer."""
    options, adjusted = case.options, logits.clone()
    repetition = float(options.get("repetition_penalty", 1.0))
    if repetition != 1.0:
        seen = torch.tensor(sorted({*case.prompt, *before}))
        scores = adjusted[seen]
        adjusted[seen] = torch.where(scores < 0, scores * repetition, scores / repetition)
    frequency, presence = (float(options.get(f"{name}_penalty", 0.0)) for name in ("frequency", "presence"))
    if (frequency or presence) and before:
        counts = torch.bincount(torch.tensor(list(before)), minlength=len(adjusted)).to(adjusted.dtype)
        adjusted -= frequency * counts + presence * (counts > 0)
    return adjusted
