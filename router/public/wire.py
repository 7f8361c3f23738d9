"""The public plane between protobuf and plain values. Repeated fields stay unread: the validator counts them first."""

from dataclasses import asdict

from baton.generation.sampling import NUMBERS, BeamStop
from baton.generation.structured.output import MAX_CHOICES, StructuredKind, StructuredOutput
from baton.protos import baton_pb2
from baton.router.model.served_model import ChosenModel
from baton.router.model.validation import MAX_BAD_WORDS, MAX_MESSAGES
from baton.router.model.validation import MAX_CHOICES as MAX_CHOICES_MADE
from baton.router.request.resume import ReportedChoice, ResumeRequest
from baton.router.types.events import TokenLogprob
from baton.router.types.request import (
    ChatPrompt,
    GenerationRequest,
    Message,
    Operation,
    Prompt,
    RequestedSampling,
    TextPrompt,
    TokenPrompt,
)
from baton.router.types.response import (
    ChoiceFinished,
    Delta,
    Finished,
    FinishReason,
    PromptPart,
    ResponseEvent,
    Started,
    Summary,
)

_REASONS = {
    FinishReason.STOP: baton_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: baton_pb2.FINISH_REASON_LENGTH,
}

_STAGES = frozenset(field.name for field in baton_pb2.Timings.DESCRIPTOR.fields)

_BEAM_STOPS = {
    baton_pb2.EARLY_STOPPING_UNSPECIFIED: BeamStop.UNPROMISING,
    baton_pb2.EARLY_STOPPING_FULL: BeamStop.FULL,
    baton_pb2.EARLY_STOPPING_NEVER: BeamStop.NEVER,
}
Response = baton_pb2.GenerateResponse | baton_pb2.ChatResponse | baton_pb2.ResumeResponse


def generate_request(message: baton_pb2.GenerateRequest) -> GenerationRequest:
    prompt: Prompt | None = None
    match message.WhichOneof("prompt"):
        case "text":
            prompt = TextPrompt(message.text)
        case "token_ids":
            prompt = TokenPrompt(message.token_ids.ids)
    return GenerationRequest(
        operation=Operation.GENERATE,
        prompt=prompt,
        request_id=message.request_id,
        model=message.model,
        sampling=_sampling(message.sampling),
        cache_salt=message.cache_salt,
        echo=message.echo,
        priority=message.priority,
    )


def chat_request(message: baton_pb2.ChatRequest) -> GenerationRequest:
    # One more than is allowed is enough for the validator to refuse them.
    messages = [Message(each.role, each.content) for each in message.messages[: MAX_MESSAGES + 1]]
    return GenerationRequest(
        operation=Operation.CHAT,
        prompt=ChatPrompt(messages),
        request_id=message.request_id,
        model=message.model,
        sampling=_sampling(message.sampling),
        cache_salt=message.cache_salt,
        priority=message.priority,
    )


def resume_request(message: baton_pb2.ResumeRequest) -> ResumeRequest:
    request: GenerationRequest | None = None
    match message.WhichOneof("request"):
        case "generate":
            request = generate_request(message.generate)
        case "chat":
            request = chat_request(message.chat)
    return ResumeRequest(
        request_id=message.request_id,
        resume_token=message.resume_token,
        choices=[
            ReportedChoice(choice.index, choice.token_ids, choice.text_bytes, choice.finished)
            for choice in message.choices[: MAX_CHOICES_MADE + 1]
        ],
        prompt_tokens=message.prompt_tokens,
        request=request,
    )


class Responses:
    """The responses of one stream, of either kind. A response holds until the next one is asked for."""

    def __init__(self, kind: type[Response]) -> None:
        self._kind = kind
        self._response = kind()
        self._delta = self._response.delta  # one message for all deltas: to make one takes longer than to fill it
        self._delta.SetInParent()

    def of(self, event: ResponseEvent) -> Response:
        if not isinstance(event, Delta):
            return _fill(self._kind(), event)
        delta = self._delta
        delta.index, delta.offset, delta.text = event.index, event.offset, event.text
        delta.token_ids[:] = event.token_ids
        if event.logprobs:
            delta.logprobs.CopyFrom(_logprobs(event.logprobs))
        elif delta.HasField("logprobs"):
            delta.ClearField("logprobs")
        return self._response


def _fill(response: Response, event: Started | PromptPart | Finished) -> Response:
    """Puts an event into an empty response, and returns it."""
    match event:
        case Started():
            started = response.started
            started.request_id, started.model, started.seed = event.request_id, event.model, event.seed
            started.prompt_tokens, started.resume_token = event.prompt_tokens, event.resume_token
            started.SetInParent()
        case PromptPart(offset, token_ids, text, logprobs):
            part = response.prompt
            part.offset, part.text = offset, text
            part.token_ids.extend(token_ids)
            if logprobs:
                part.logprobs.CopyFrom(_logprobs(logprobs))
            part.SetInParent()
        case Finished(choice, summary):
            response.finished.CopyFrom(_finished(choice, summary))
    return response


def model(chosen: ChosenModel) -> baton_pb2.Model:
    served = chosen.served
    return baton_pb2.Model(
        name=chosen.name,
        parent=served.name if chosen.adapter is not None else "",
        max_model_len=served.max_model_len,
        vocab_size=served.vocab_size,
        dtype=served.dtype,
        block_size=served.block_tokens,
    )


def _sampling(message: baton_pb2.SamplingParams) -> RequestedSampling:
    return RequestedSampling(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        numbers={each.name: value for each, value in message.ListFields() if each.name in NUMBERS},
        seed=message.seed if message.HasField("seed") else None,
        stop=message.stop,
        stop_token_ids=message.stop_token_ids,
        ignore_eos=message.ignore_eos,
        n=message.n if message.HasField("n") else None,
        logit_bias=message.logit_bias,
        allowed_token_ids=message.allowed_token_ids,
        bad_words=message.bad_words,
        bad_word_token_ids=[word.ids for word in message.bad_word_token_ids[: MAX_BAD_WORDS + 1]],
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        best_of=message.best_of if message.HasField("best_of") else None,
        beam_width=message.beam_width if message.HasField("beam_width") else None,
        length_penalty=message.length_penalty if message.HasField("length_penalty") else None,
        early_stopping=_BEAM_STOPS.get(message.early_stopping),
        structured=_structured(message),
    )


def _structured(message: baton_pb2.SamplingParams) -> StructuredOutput | None:
    match message.WhichOneof("structured"):
        case None:
            return None
        case "json_object":
            return StructuredOutput(StructuredKind.JSON_OBJECT) if message.json_object else None
        case "choice":
            # One more than is allowed is enough for the validator to refuse them.
            return StructuredOutput.choice(message.choice.texts[: MAX_CHOICES + 1])
        case kind:
            return StructuredOutput(StructuredKind(kind), getattr(message, kind))


def _logprobs(logprobs: tuple[TokenLogprob, ...]) -> baton_pb2.Logprobs:
    return baton_pb2.Logprobs(
        chosen=[token.logprob for token in logprobs],
        top_token_ids=[each.token_id for token in logprobs for each in token.top],
        top_logprobs=[each.logprob for token in logprobs for each in token.top],
    )


def _finished(choice: ChoiceFinished, summary: Summary | None) -> baton_pb2.Finished:
    finished = baton_pb2.Finished(
        index=choice.index,
        reason=_REASONS[choice.reason],
        stop_text=choice.stop_text,
        stop_token_id=choice.stop_token_id,
    )
    if summary is not None:
        timings = summary.timings
        finished.usage.CopyFrom(baton_pb2.Usage(**asdict(summary.usage)))
        finished.timings.CopyFrom(
            baton_pb2.Timings(
                **{name: value for name, value in asdict(timings.stages).items() if name in _STAGES},
                transfer_bytes=timings.transfer_bytes,
                transport=timings.transport,
                prefill_pid=timings.prefill_pid,
                decode_pid=timings.decode_pid,
            )
        )
    return finished
