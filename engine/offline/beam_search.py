"""Parameters and results of beam search under vLLM's names. The algorithm is engine/scheduler/beam_search.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from baton.engine.offline.answer import CompletionOutput, Logprob, RequestOutput
from baton.engine.offline.params import SamplingParams
from baton.engine.sampling import params as sampling_params
from baton.engine.sampling.params import candidates_per_beam
from baton.text.sampling import BeamParams, BeamStop, FieldRefused, check_alone

EarlyStopping = bool | Literal["never"]
_STOPS: dict[EarlyStopping, BeamStop] = {
    False: BeamStop.UNPROMISING,
    True: BeamStop.FULL,
    "never": BeamStop.NEVER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Beam search parameters of vLLM, and transformers' `early_stopping`. The length penalty counts only answer tokens.

    Creating a request raises ValueError, naming the field.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # must be 0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False  # keep the end-of-sequence token in `tokens` and `text`
    early_stopping: EarlyStopping = False

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters without the beam fields, which `searching` adds. Raises: ValueError."""
        check_alone("beam_width", (("temperature", self.temperature),))
        if self.beam_width < 1:
            raise FieldRefused("beam_width", "must be at least 1")
        return SamplingParams(
            n=self.beam_width,
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=0,
            detokenize=False,
        )

    def searching(self, resolved: sampling_params.SamplingParams) -> sampling_params.SamplingParams:
        """Return the engine's parameters: `resolved` plus the fields of beam search. Raises: ValueError."""
        if self.early_stopping not in _STOPS:
            raise ValueError(f"early_stopping is {self.early_stopping!r}; it must be True, False or 'never'")
        beam = BeamParams(self.beam_width, self.length_penalty, _STOPS[self.early_stopping])
        return replace(resolved, beam=beam, logprobs=candidates_per_beam(beam.width, resolved.stop_token_ids))


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One sequence that beam search found. As in vLLM, `tokens` and `text` begin with the prompt."""

    tokens: list[int]
    text: str
    cum_logprob: float  # sum over the answer's tokens, including the end-of-sequence token
    score: float  # cum_logprob / (number of answer tokens ** length_penalty); higher is better
    logprobs: list[dict[int, Logprob]]  # one per token of the answer
    finish_reason: str | None  # stop or length
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The `beam_width` best sequences of one prompt, best first; empty if logits were not finite."""

    sequences: list[BeamSearchSequence]


def beam_search_output(
    output: RequestOutput, params: BeamSearchParams, decode: Callable[[Sequence[int]], str]
) -> BeamSearchOutput:
    found = [_sequence(output, each, params, decode) for each in output.outputs if each.finish_reason != "error"]
    return BeamSearchOutput(found)


def _sequence(
    output: RequestOutput, found: CompletionOutput, params: BeamSearchParams, decode: Callable[[Sequence[int]], str]
) -> BeamSearchSequence:
    hidden = found.finish_reason == "stop" and not params.include_stop_str_in_output
    tokens = output.prompt_token_ids + (found.token_ids[:-1] if hidden else found.token_ids)
    return BeamSearchSequence(
        tokens,
        decode(tokens),
        found.cumulative_logprob,
        found.cumulative_logprob / float(len(found.token_ids) ** params.length_penalty),
        found.logprobs or [],
        found.finish_reason,
        found.token_ids[-1] if found.finish_reason == "stop" else None,
    )
