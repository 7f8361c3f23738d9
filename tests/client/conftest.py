"""A BatonService in this process that does what a test tells it to."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from baton.protos import admin_pb2, admin_pb2_grpc, baton_pb2, baton_pb2_grpc
from tests.fixtures.servers import Register, threaded_server

TOKEN = "t" * 32
Answer = Callable[[Any, grpc.ServicerContext], Iterable[baton_pb2.GenerateResponse]]


class Events:
    """Makes the responses of a stream."""

    def started(self, **fields: Any) -> baton_pb2.GenerateResponse:
        given: dict[str, Any] = {"request_id": "r-1", "model": "tiny", "prompt_tokens": 3, "seed": 2**63 + 1} | fields
        return baton_pb2.GenerateResponse(started=baton_pb2.Started(**given))

    def delta(self, offset: int, token_ids: list[int], text: str, index: int = 0) -> baton_pb2.GenerateResponse:
        delta = baton_pb2.Delta(index=index, offset=offset, token_ids=token_ids, text=text)
        return baton_pb2.GenerateResponse(delta=delta)

    def finished(self, index: int = 0, last: bool = True, **fields: Any) -> baton_pb2.GenerateResponse:
        finished = baton_pb2.Finished(**{"index": index, "reason": baton_pb2.FINISH_REASON_LENGTH} | fields)
        if last:
            finished.usage.CopyFrom(baton_pb2.Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=0))
            finished.timings.CopyFrom(baton_pb2.Timings(ttft_ms=1.5, transport="grpc", transfer_bytes=4096))
        return baton_pb2.GenerateResponse(finished=finished)


@dataclass
class FakeBaton(baton_pb2_grpc.BatonServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Each call takes the next of `answers`, a Resume the next of `resumed`; the last one stays."""

    answers: list[Answer]
    resumed: list[Answer] = field(default_factory=list)  # none: it cannot be reached for that
    target: str = ""
    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)  # a call is over, whoever ended it

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        yield from self._answer(request, context)

    def Chat(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        for response in self._answer(request, context):
            yield baton_pb2.ChatResponse.FromString(response.SerializeToString())

    def Resume(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        if not self.resumed:
            abort(context, grpc.StatusCode.UNAVAILABLE, "gone")
        self.requests.append(request)
        for response in _next(self.resumed)(request, context):
            yield baton_pb2.ResumeResponse.FromString(response.SerializeToString())

    def Tokenize(self, request: Any, context: grpc.ServicerContext) -> baton_pb2.TokenizeResponse:
        for _ in self._answer(request, context):
            pass
        return baton_pb2.TokenizeResponse(token_ids=[len(word) for word in request.text.split()])

    def Detokenize(self, request: Any, context: grpc.ServicerContext) -> baton_pb2.DetokenizeResponse:
        return baton_pb2.DetokenizeResponse(text=" ".join(str(token) for token in request.token_ids))

    def Embed(self, request: Any, context: grpc.ServicerContext) -> baton_pb2.EmbedResponse:
        before = len(request.prompt_name) + 1 if request.HasField("prompt_name") else 0
        sizes = [before + (len(each.text) or len(each.token_ids.ids)) for each in request.inputs]
        vectors = [baton_pb2.Embedding(values=[size] * (request.dimensions or 3)) for size in sizes]
        return baton_pb2.EmbedResponse(model=request.model, embeddings=vectors, usage=baton_pb2.Usage(prompt_tokens=9))

    def Score(self, request: Any, context: grpc.ServicerContext) -> baton_pb2.ScoreResponse:
        scores = [len(request.queries) / len(document) for document in request.documents]
        usage = baton_pb2.Usage(prompt_tokens=9)
        return baton_pb2.ScoreResponse(model=request.model, scores=scores, usage=usage, model_version="0a1b")

    def ListModels(self, request: Any, context: grpc.ServicerContext) -> baton_pb2.ListModelsResponse:
        return baton_pb2.ListModelsResponse(models=[baton_pb2.Model(name="tiny", max_model_len=64, block_size=32)])

    def GetModel(self, request: Any, context: grpc.ServicerContext) -> baton_pb2.GetModelResponse:
        if request.model != "tiny":
            resource = error_details_pb2.ResourceInfo(resource_type="model", resource_name=request.model)
            abort(context, grpc.StatusCode.NOT_FOUND, "no such model", resource)
        return baton_pb2.GetModelResponse(model=baton_pb2.Model(name="tiny"))

    def GetStatus(self, request: Any, context: grpc.ServicerContext) -> admin_pb2.GetStatusResponse:
        return admin_pb2.GetStatusResponse(ready=True, active_requests=2)

    def register(self, server: grpc.Server) -> None:
        baton_pb2_grpc.add_BatonServiceServicer_to_server(self, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, server)

    def _answer(self, request: Any, context: grpc.ServicerContext) -> Iterable[baton_pb2.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        context.add_callback(self.ended.set)
        return _next(self.answers)(request, context)


def _next(answers: list[Answer]) -> Answer:
    return answers.pop(0) if len(answers) > 1 else answers[0]


@contextmanager
def serving(fake: FakeBaton, *register: Register, address: str = "127.0.0.1:0") -> Iterator[None]:
    """Serve, also what `register` adds to the server, and set the target of `fake`."""
    with threaded_server(fake.register, *register, address=address) as port:
        fake.target = f"{address.partition(':')[0]}:{port}"
        yield


def abort(context: grpc.ServicerContext, code: grpc.StatusCode, message: str, *details: Message) -> NoReturn:
    packed = [AnyMessage() for _ in details]
    for box, detail in zip(packed, details, strict=True):
        box.Pack(detail)
    number: int = code.value[0]
    context.abort_with_status(rpc_status.to_status(status_pb2.Status(code=number, message=message, details=packed)))
    raise AssertionError("unreachable")


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def aborting() -> Callable[..., Answer]:
    """`aborting(code, message, *details)` is an answer that ends with that status at once."""

    def make(code: grpc.StatusCode, message: str, *details: Message) -> Answer:
        def answer(request: Any, context: grpc.ServicerContext) -> Iterable[baton_pb2.GenerateResponse]:
            abort(context, code, message, *details)

        return answer

    return make


@pytest.fixture
def hello(events: Events) -> Answer:
    """Three tokens that say hello."""

    def answer(request: Any, context: grpc.ServicerContext) -> Iterable[baton_pb2.GenerateResponse]:
        yield events.started()
        yield events.delta(0, [5], "he")
        yield events.delta(1, [6, 7], "llo")
        yield events.finished()

    return answer


@pytest.fixture
def baton(hello: Answer) -> Iterator[FakeBaton]:
    fake = FakeBaton([hello])
    with serving(fake):
        yield fake


@pytest.fixture
def rest(events: Events) -> Answer:
    """What follows the first token of hello."""

    def answer(request: Any, context: grpc.ServicerContext) -> Iterable[baton_pb2.GenerateResponse]:
        yield events.started(resume_token=TOKEN)
        yield events.delta(1, [6, 7], "llö")
        yield events.finished()

    return answer


@pytest.fixture
def other(hello: Answer, rest: Answer) -> Iterator[FakeBaton]:
    """Another router, which can resume streams of the first one."""
    fake = FakeBaton([hello], resumed=[rest])
    with serving(fake):
        yield fake


@pytest.fixture
def breaks(events: Events, aborting: Any) -> Answer:
    """One token, half a word, and the router is gone."""

    def answer(request: Any, context: grpc.ServicerContext) -> Iterable[baton_pb2.GenerateResponse]:
        yield events.started(resume_token=TOKEN)
        yield events.delta(0, [5], "hé")
        yield from aborting(grpc.StatusCode.UNAVAILABLE, "Socket closed")(request, context)

    return answer
