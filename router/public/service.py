"""The public servicer: parse, call, pack. Everything else happens in the dispatcher."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc

from baton.protos import baton_pb2
from baton.router.dispatcher import Dispatcher
from baton.router.public import wire as public_wire
from baton.router.public.access import Access, Caller, Metadata, Need
from baton.router.public.parsing import Prevalidator, service_handler
from baton.router.request.resume import ResumeRequest
from baton.router.trace.record import end_of
from baton.router.types.request import GenerationRequest, Operation, session_of
from baton.service.errors import Aborted, BatonError, InvalidArgument
from baton.service.telemetry.trace_context import current_trace

SERVICE_NAME = "baton.v1.BatonService"
MAX_DETOKENIZE_TOKENS = 1 << 17
GENERATING = {"Generate": Operation.GENERATE, "Chat": Operation.CHAT, "Resume": Operation.GENERATE}
"""Methods whose calls are requests."""

Context = grpc.aio.ServicerContext[Any, Any]


class BatonServicer:
    """Methods are named as in baton.proto.

    Streams are written, not yielded: so a cancellation reaches our code where it waits, and the request's resources
    are freed at once.
    """

    def __init__(self, dispatcher: Dispatcher, access: Access, prevalidator: Prevalidator | None = None) -> None:
        """`prevalidator` looks at large messages before they are parsed; None: no check."""
        self._prevalidator = prevalidator
        self._dispatcher = dispatcher
        self._access = access

    def register(self, server: grpc.aio.Server) -> None:
        service = baton_pb2.DESCRIPTOR.services_by_name["BatonService"]
        server.add_generic_rpc_handlers((service_handler(service, self, self._prevalidator, self.refused),))

    def refused(self, method: str, error: BatonError) -> None:
        """A call of that method came to nothing before it was a request."""
        operation = GENERATING.get(method)
        if operation is not None:
            self._dispatcher.accounts.refuse(operation, current_trace.get(), end_of(error, dispatched=False))

    def authorise(self, method: str, metadata: Metadata) -> Caller:
        """As Access.authorise; requests that it refuses are counted."""
        try:
            return self._access.authorise(method, metadata)
        except BatonError as error:
            if method.rpartition("/")[2] in GENERATING:
                self._dispatcher.accounts.counts.refuse(end_of(error, dispatched=False))
            raise

    async def Generate(self, message: baton_pb2.GenerateRequest, context: Context) -> None:
        await self._answer(public_wire.generate_request(message), context, baton_pb2.GenerateResponse)

    async def Chat(self, message: baton_pb2.ChatRequest, context: Context) -> None:
        await self._answer(public_wire.chat_request(message), context, baton_pb2.ChatResponse)

    async def Resume(self, message: baton_pb2.ResumeRequest, context: Context) -> None:
        metadata = context.invocation_metadata() or ()
        asked = self._access.caller(Need.KEY, metadata).resumes(public_wire.resume_request(message))
        await self._write(asked, context, baton_pb2.ResumeResponse)

    async def Tokenize(self, message: baton_pb2.TokenizeRequest, context: Context) -> baton_pb2.TokenizeResponse:
        served = (await self._dispatcher.choose(message.model)).served
        token_ids = await served.tokenize(message.text, message.add_special_tokens)
        return baton_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(self, message: baton_pb2.DetokenizeRequest, context: Context) -> baton_pb2.DetokenizeResponse:
        served = (await self._dispatcher.choose(message.model)).served
        if len(message.token_ids) > MAX_DETOKENIZE_TOKENS:
            raise InvalidArgument("token_ids", f"at most {MAX_DETOKENIZE_TOKENS}, not {len(message.token_ids)}")
        token_ids = await served.tokenizer.checked("token_ids", message.token_ids, served.vocab_size)
        text = await served.tokenizer.decode(token_ids, message.skip_special_tokens)
        return baton_pb2.DetokenizeResponse(text=text)

    async def ListModels(self, message: baton_pb2.ListModelsRequest, context: Context) -> baton_pb2.ListModelsResponse:
        chosen = await self._dispatcher.models()
        return baton_pb2.ListModelsResponse(models=[public_wire.model(each) for each in chosen])

    async def GetModel(self, message: baton_pb2.GetModelRequest, context: Context) -> baton_pb2.GetModelResponse:
        if not message.model:
            raise InvalidArgument("model", "is empty")
        chosen = await self._dispatcher.choose(message.model)
        return baton_pb2.GetModelResponse(model=public_wire.model(chosen))

    async def _answer(
        self,
        request: GenerationRequest,
        context: Context,
        kind: type[public_wire.Response],
    ) -> None:
        metadata = context.invocation_metadata() or ()
        caller = self._access.caller(Need.KEY, metadata)
        await self._write(replace(caller.asks(request), session=session_of(metadata)), context, kind)

    async def _write(
        self, request: GenerationRequest | ResumeRequest, context: Context, kind: type[public_wire.Response]
    ) -> None:
        responses = public_wire.Responses(kind)
        try:
            async with asyncio.timeout(None) as life:
                events = self._dispatcher.answer(request, context.time_remaining(), current_trace.get(), life)
                async with aclosing(events):
                    async for event in events:
                        await context.write(responses.of(event))  # when it returns the message is bytes
        except TimeoutError:
            if not life.expired():
                raise
            raise Aborted("another stream continues this request", "SUPERSEDED") from None
