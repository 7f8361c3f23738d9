"""Servicer of the public gRPC API: converts protobuf to plain requests, and the dispatcher's events to protobuf.

Repeated fields of a request are not read here, since the validator must count their values first.
"""

import asyncio
import inspect
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from baton.process.errors import Aborted, BatonError, InvalidArgument
from baton.process.objectives import RequestedObjectives
from baton.process.telemetry.trace_context import current_trace
from baton.protos import baton_pb2
from baton.router.dispatcher import Dispatcher
from baton.router.model.served_model import ChosenModel
from baton.router.public.access import Access, Caller, Metadata, Need
from baton.router.public.chat import ReadChat, read_chat
from baton.router.public.chat_wire import Parts, chat_asked, chat_messages, in_own_words, is_plain
from baton.router.public.parsing import SMALL_BYTES, Prevalidator, Unparsed
from baton.router.public.vectors import VectorCall
from baton.router.request.resume import ReportedChoice, ResumeRequest
from baton.router.trace.record import end_of
from baton.router.types.events import TokenLogprob
from baton.router.types.request import (
    ChatPrompt,
    GenerationRequest,
    Operation,
    Prompt,
    RequestedSampling,
    RequestedSpeculation,
    TextPrompt,
    TokenPrompt,
    session_of,
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
from baton.text.pooling import MAX_INPUTS
from baton.text.sampling import MAX_BAD_WORDS, NUMBERS, BeamStop
from baton.text.sampling import MAX_CHOICES as MAX_CHOICES_MADE
from baton.text.structured.output import MAX_CHOICES, StructuredKind, StructuredOutput

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


def _objectives(message: baton_pb2.GenerateRequest | baton_pb2.ChatRequest) -> RequestedObjectives:
    return RequestedObjectives(
        message.ttft_slo_ms if message.HasField("ttft_slo_ms") else None,
        message.tbt_slo_ms if message.HasField("tbt_slo_ms") else None,
    )


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
        objectives=_objectives(message),
        session_id=message.session_id,
        keep_for_s=message.keep_for_s if message.HasField("keep_for_s") else None,
        done=message.done,
    )


def _input(index: int, message: baton_pb2.EmbedInput) -> Prompt:
    """Convert an input of Embed to a prompt. Raises: InvalidArgument."""
    match message.WhichOneof("input"):
        case "text":
            return TextPrompt(message.text)
        case "token_ids":
            return TokenPrompt(message.token_ids.ids)
    raise InvalidArgument(f"inputs[{index}]", "text or token_ids is required")


def chat_request(message: baton_pb2.ChatRequest) -> GenerationRequest:
    with_prompt = message.add_generation_prompt or not message.HasField("add_generation_prompt")
    return GenerationRequest(
        operation=Operation.CHAT,
        prompt=ChatPrompt(chat_messages(message), add_generation_prompt=with_prompt),
        request_id=message.request_id,
        model=message.model,
        sampling=_sampling(message.sampling),
        cache_salt=message.cache_salt,
        priority=message.priority,
        objectives=_objectives(message),
        session_id=message.session_id,
        keep_for_s=message.keep_for_s if message.HasField("keep_for_s") else None,
        done=message.done,
    )


def resume_request(message: baton_pb2.ResumeRequest, in_parts: bool = False) -> ResumeRequest:
    """Convert a resume request. `in_parts`: the answer's complete text is delivered, from which `Parts` skips what the
    client has.
    """
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
            ReportedChoice(choice.index, choice.token_ids, 0 if in_parts else choice.text_bytes, choice.finished)
            for choice in message.choices[: MAX_CHOICES_MADE + 1]
        ],
        prompt_tokens=message.prompt_tokens,
        request=request,
    )


class Responses:
    """Converts the events of one stream to response messages. A message is valid until the next one is requested."""

    def __init__(self, kind: type[Response], parts: Parts | None = None) -> None:
        """Create a converter to messages of type `kind`. `parts`: splits the answer; None: the answer is not split."""
        self._kind = kind
        self._parts = parts
        self._response = kind()
        self._delta = self._response.delta  # reused for all deltas: creating a message takes longer than filling it
        self._delta.SetInParent()

    def all_of(self, event: ResponseEvent) -> Iterable[Response]:
        """Return the messages for an event. Each must be written before the next is requested."""
        return (self.of(event),) if self._parts is None else self._in_parts(event, self._parts)

    def _in_parts(self, event: ResponseEvent, parts: Parts) -> Iterator[Response]:
        match event:
            case Delta():
                yield from map(self._of_part, parts.of(event))
            case Finished(choice):
                yield from map(self._of_part, parts.rest(choice.index))
                response = self.of(event)
                parts.end(response.finished, choice.reason)
                yield response
            case _:
                yield self.of(event)

    def _of_part(self, part: Delta | baton_pb2.ChatResponse) -> Response:
        if isinstance(part, Delta):
            return self.of(part)
        response = self._kind()
        response.MergeFromString(part.SerializeToString())  # field numbers are the same in all response types
        return response

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
    """Fill an empty response message with an event, and return the message."""
    match event:
        case Started():
            started = response.started
            started.request_id, started.model, started.seed = event.request_id, event.model, event.seed
            started.prompt_tokens, started.resume_token = event.prompt_tokens, event.resume_token
            started.model_version = event.version
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
        parent=served.name if chosen.lora is not None else "",
        version=chosen.version,
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
        speculative=_speculative(message),
    )


def _speculative(message: baton_pb2.SamplingParams) -> RequestedSpeculation | None:
    asked = message.speculative
    if not message.HasField("speculative"):
        return None
    tokens = asked.num_speculative_tokens if asked.HasField("num_speculative_tokens") else None
    return RequestedSpeculation(asked.method, tokens)


def _structured(message: baton_pb2.SamplingParams) -> StructuredOutput | None:
    match message.WhichOneof("structured"):
        case None:
            return None
        case "json_object":
            return StructuredOutput(StructuredKind.JSON_OBJECT) if message.json_object else None
        case "choice":
            # Only one text more than the maximum is read: it suffices for the validator to reject the request.
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


SERVICE_NAME = "baton.v1.BatonService"
MAX_DETOKENIZE_TOKENS = 1 << 17
GENERATING = {
    "Generate": Operation.GENERATE,
    "Chat": Operation.CHAT,
    "Resume": Operation.GENERATE,
    "Embed": Operation.EMBED,
    "Score": Operation.EMBED,
}
"""Methods whose calls are requests."""

Context = grpc.aio.ServicerContext[Any, Any]


RefusedCall = Callable[[str, BatonError], None]
"""Function called with a method's name and the error of a message that was not parsed."""


def service_handler(
    service: ServiceDescriptor,
    servicer: object,
    prevalidator: Prevalidator | None = None,
    refused: RefusedCall = lambda method, error: None,
) -> grpc.GenericRpcHandler:
    """Return the gRPC handlers of all methods of a service. Their parsers never raise.

    `prevalidator`: checks large requests; None: they are parsed on the event loop. `refused`: called with each method
    and error of a request that cannot be parsed.
    """
    return grpc.method_handlers_generic_handler(
        service.full_name,
        {
            method.name: _method_handler(
                method, getattr(servicer, method.name), prevalidator, partial(refused, method.name)
            )
            for method in service.methods
        },
    )


def small_parser(message_class: type[Message]) -> Callable[[bytes], Message | Unparsed]:
    """Create a parser that parses only small, valid messages, and returns all others unparsed."""

    def parse(data: bytes) -> Message | Unparsed:
        if len(data) > SMALL_BYTES:
            return Unparsed(message_class, data)
        try:
            return message_class.FromString(data)
        except DecodeError:  # finding the invalid field takes time, so the handler does it
            return Unparsed(message_class, data)

    return parse


def _method_handler(
    method: Any,
    behaviour: Callable[[Any, Any], Any],
    prevalidator: Prevalidator | None,
    refused: Callable[[BatonError], None],
) -> Any:
    if not inspect.iscoroutinefunction(behaviour):
        raise TypeError(f"{behaviour} must be a coroutine function; a stream is written with context.write()")

    async def handle(request: Message | Unparsed, context: Any) -> Any:
        try:
            if isinstance(request, Unparsed):
                request = request.parse() if prevalidator is None else await prevalidator(request)
        except BatonError as error:
            refused(error)
            raise
        return await behaviour(request, context)

    make_handler = (
        grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
    )
    return make_handler(
        handle,
        request_deserializer=small_parser(GetMessageClass(method.input_type)),
        response_serializer=GetMessageClass(method.output_type).SerializeToString,
    )


class BatonServicer:
    """gRPC servicer of the public port. Its methods are those of BatonService in baton.proto.

    Streams call `context.write()` instead of yielding: a cancellation then interrupts the waiting code, and the
    request's resources are released immediately.
    """

    def __init__(self, dispatcher: Dispatcher, access: Access, prevalidator: Prevalidator | None = None) -> None:
        """Create the servicer. `prevalidator`: checks large messages before they are parsed; None: no check."""
        self._prevalidator = prevalidator
        self._dispatcher = dispatcher
        self._access = access

    def register(self, server: grpc.aio.Server) -> None:
        service = baton_pb2.DESCRIPTOR.services_by_name["BatonService"]
        server.add_generic_rpc_handlers((service_handler(service, self, self._prevalidator, self.refused),))

    def refused(self, method: str, error: BatonError) -> None:
        """Count a call of `method` that failed before it became a request."""
        operation = GENERATING.get(method)
        if operation is not None:
            self._dispatcher.accounts.refuse(operation, current_trace.get(), end_of(error, dispatched=False))

    def authorise(self, method: str, metadata: Metadata) -> Caller:
        """Identify the caller, as `Access.authorise` does. A refused caller's request is counted as rejected."""
        try:
            return self._access.authorise(method, metadata)
        except BatonError as error:
            if method.rpartition("/")[2] in GENERATING:
                self._dispatcher.accounts.counts.refuse(end_of(error, dispatched=False))
            raise

    async def Generate(self, message: baton_pb2.GenerateRequest, context: Context) -> None:
        await self._answer(generate_request(message), context, baton_pb2.GenerateResponse)

    async def Chat(self, message: baton_pb2.ChatRequest, context: Context) -> None:
        request = chat_request(message)
        chat = None if is_plain(message) else await self._read(message, request, "Chat")
        await self._answer(request if chat is None else chat.request, context, baton_pb2.ChatResponse, chat)

    async def Resume(self, message: baton_pb2.ResumeRequest, context: Context) -> None:
        metadata = context.invocation_metadata() or ()
        asked, parts = resume_request(message), None
        if asked.request is not None and message.HasField("chat") and not is_plain(message.chat):
            chat = await self._read(message.chat, asked.request, "Resume")
            if chat.parser is not None:
                asked, parts = resume_request(message, in_parts=True), Parts(chat, message.choices)
            asked = replace(asked, request=chat.request)
        asked = self._access.caller(Need.KEY, metadata).resumes(asked)
        await self._write(asked, context, baton_pb2.ResumeResponse, parts)

    async def Embed(self, message: baton_pb2.EmbedRequest, context: Context) -> baton_pb2.EmbedResponse:
        # Only one input more than the maximum is read: it suffices to reject the call.
        inputs = [_input(index, each) for index, each in enumerate(message.inputs[: MAX_INPUTS + 1])]
        dimensions = message.dimensions if message.HasField("dimensions") else None
        prompt_name = message.prompt_name if message.HasField("prompt_name") else None
        call = self._vectors(message, context)
        made = await call.embed(inputs, dimensions, prompt_name)
        return baton_pb2.EmbedResponse(
            request_id=call.request_id,
            model=made.model,
            embeddings=[baton_pb2.Embedding(values=numbers) for numbers in made.numbers],
            usage=baton_pb2.Usage(**asdict(made.usage)),
            model_version=made.version,
        )

    async def Score(self, message: baton_pb2.ScoreRequest, context: Context) -> baton_pb2.ScoreResponse:
        queries, documents = message.queries[: MAX_INPUTS + 1], message.documents[: MAX_INPUTS + 1]
        call = self._vectors(message, context)
        made = await call.score(queries, documents)
        return baton_pb2.ScoreResponse(
            request_id=call.request_id,
            model=made.model,
            scores=made.scores,
            usage=baton_pb2.Usage(**asdict(made.usage)),
            model_version=made.version,
        )

    def _vectors(self, message: baton_pb2.EmbedRequest | baton_pb2.ScoreRequest, context: Context) -> VectorCall:
        metadata = context.invocation_metadata() or ()
        return VectorCall(
            self._dispatcher,
            self._access.caller(Need.KEY, metadata),
            model=message.model,
            request_id=message.request_id or f"req-{secrets.token_hex(8)}",
            cache_salt=message.cache_salt,
            priority=message.priority,
            session=session_of(metadata),
            time_left_s=context.time_remaining(),
            trace=current_trace.get(),
        )

    async def Tokenize(self, message: baton_pb2.TokenizeRequest, context: Context) -> baton_pb2.TokenizeResponse:
        served = (await self._dispatcher.choose(message.model)).served
        caller = self._access.caller(Need.KEY, context.invocation_metadata() or ())
        token_ids = await served.tokenize(message.text, message.add_special_tokens, caller.tenant)
        return baton_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(self, message: baton_pb2.DetokenizeRequest, context: Context) -> baton_pb2.DetokenizeResponse:
        served = (await self._dispatcher.choose(message.model)).served
        if len(message.token_ids) > MAX_DETOKENIZE_TOKENS:
            raise InvalidArgument("token_ids", f"{len(message.token_ids)} exceed the maximum {MAX_DETOKENIZE_TOKENS}")
        token_ids = await served.tokenizer.checked("token_ids", message.token_ids, served.vocab_size)
        text = await served.tokenizer.decode(token_ids, message.skip_special_tokens)
        return baton_pb2.DetokenizeResponse(text=text)

    async def ListModels(self, message: baton_pb2.ListModelsRequest, context: Context) -> baton_pb2.ListModelsResponse:
        chosen = await self._dispatcher.models()
        return baton_pb2.ListModelsResponse(models=[model(each) for each in chosen])

    async def GetModel(self, message: baton_pb2.GetModelRequest, context: Context) -> baton_pb2.GetModelResponse:
        if not message.model:
            raise InvalidArgument("model", "is empty")
        chosen = await self._dispatcher.choose(message.model)
        return baton_pb2.GetModelResponse(model=model(chosen))

    async def _answer(
        self,
        request: GenerationRequest,
        context: Context,
        kind: type[Response],
        chat: ReadChat | None = None,
    ) -> None:
        metadata = context.invocation_metadata() or ()
        caller = self._access.caller(Need.KEY, metadata)
        session = session_of(metadata)
        asked = replace(caller.asks(request), session=session, session_id=request.session_id or session)
        await self._write(asked, context, kind, Parts(chat) if chat is not None and chat.parser is not None else None)

    async def _read(self, message: baton_pb2.ChatRequest, request: GenerationRequest, method: str) -> ReadChat:
        """Convert a chat and apply its options. Raises: BatonError, after counting the request as rejected."""
        try:
            tokenizer = (await self._dispatcher.choose(message.model)).served.tokenizer
            return await read_chat(request, chat_asked(message), tokenizer)
        except BatonError as error:
            self.refused(method, error)
            raise

    async def _write(
        self,
        request: GenerationRequest | ResumeRequest,
        context: Context,
        kind: type[Response],
        parts: Parts | None = None,
    ) -> None:
        responses = Responses(kind, parts)
        try:
            async with asyncio.timeout(None) as life:
                events = self._dispatcher.answer(request, context.time_remaining(), current_trace.get(), life)
                async with aclosing(events):
                    async for event in events:
                        for response in responses.all_of(event):
                            await context.write(response)  # serialises at once, so the message can be reused
        except InvalidArgument as error:
            raise in_own_words(error, parts.tool_forms if parts is not None else frozenset()) from error
        except TimeoutError:
            if not life.expired():
                raise
            raise Aborted("another stream continues this request", "SUPERSEDED") from None
