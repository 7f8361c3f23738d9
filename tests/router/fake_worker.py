"""Workers without an engine: real gRPC servers that speak sessions, and say what a test, or a script, tells them to."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc

from baton.process.links.connection import serve_connection
from baton.process.links.hub import LinkHub, RouterLink
from baton.process.security.cluster_secret import ClusterSecret
from baton.process.security.proofs import ProofCheck
from baton.process.serving.grpc_options import INTERNAL_SERVER_OPTIONS
from baton.process.serving.interceptors import CallInterceptor
from baton.protos import report_pb2, sampling_pb2, session_pb2, session_pb2_grpc

Session = RouterLink[session_pb2.ConnectResponse]
PROBE_ID = "readiness-probe"
Script = Callable[[list[int], int], list[int]]
"""(prompt, choice) -> the whole answer; it is cut at max_tokens and after a stop token."""

REPORT_S = 0.05
WAIT_S = 20.0


class FakeWorker(session_pb2_grpc.SessionServiceServicer):
    """One worker. `on_command` is called with every Prefill, Start and Cancel."""

    def __init__(self, info: session_pb2.WorkerInfo, epoch: int = 1) -> None:
        self.info = info
        self.epoch = epoch
        self.report = report_pb2.Report(limit_blocks=info.total_blocks, limit_slots=info.total_slots)
        self.commands: list[session_pb2.ConnectRequest] = []  # without those of readiness probes
        self.probes: list[session_pb2.ConnectRequest] = []
        self.on_command: Callable[[session_pb2.ConnectRequest], None] = lambda command: None
        self.silent = False
        self.secret: ClusterSecret | None = None  # that routers must prove to know, from the next start on
        self._changed = asyncio.Condition()
        self.session: Session | None = None  # by which the last command came
        self._hub: LinkHub[session_pb2.ConnectResponse] = LinkHub(10.0, 10_000, lambda session: None)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.port = 0

    async def start(self, port: int = 0) -> None:
        proofs = None if self.secret is None else ProofCheck(self.secret)
        interceptors = [CallInterceptor(proofs)] if proofs else []
        self._server = grpc.aio.server(interceptors=interceptors, options=INTERNAL_SERVER_OPTIONS)
        session_pb2_grpc.add_SessionServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        if proofs is not None:
            proofs.port = self.port
        await self._server.start()
        self._reporter = asyncio.create_task(self._report())

    async def stop(self) -> None:
        """The connection breaks at once; what was not said stays in the session."""
        self._reporter.cancel()
        for task in self._tasks:
            task.cancel()
        await self._server.stop(0)
        await self._server.wait_for_termination()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def Connect(
        self, request_iterator: AsyncIterator[session_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[session_pb2.ConnectResponse]:
        connection = serve_connection(self._hub, self.epoch, request_iterator, self._welcome, self._on_command)
        async for message in connection:
            yield message

    def say(self, **event: Any) -> None:
        """A numbered message, for example `say(failed=...)`."""
        if self.session is not None:
            self.session.send(session_pb2.ConnectResponse(epoch=self.epoch, **event))

    def fail(self, attempt_id: int, reason: session_pb2.FailureReason, message: str = "") -> None:
        self.say(failed=session_pb2.Failed(attempt_id=attempt_id, reason=reason, message=message))

    async def received(self, kind: str, count: int = 1) -> Any:
        """The `count`-th command of a kind that is not a readiness probe's; waits for it."""
        async with asyncio.timeout(WAIT_S), self._changed:
            while len(found := [c for c in self.commands if c.WhichOneof("command") == kind]) < count:
                await self._changed.wait()
        return getattr(found[count - 1], kind)

    def has_prompt(self, attempt_id: int) -> bool:
        """A Prefill of this attempt has come, a readiness probe's or not."""
        return any(command.prefill.attempt_id == attempt_id for command in (*self.commands, *self.probes))

    async def prompt_comes(self, attempt_id: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.has_prompt(attempt_id))

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Until it is done, or this worker stops."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def links(self) -> tuple[Session, ...]:
        return self._hub.links

    def begin_anew(self, **info: Any) -> None:
        """Goes on behind the same port under the next epoch, with these fields of its info changed."""
        before = self._hub.links
        self.epoch += 1
        self.forget_sessions()
        self.info.MergeFrom(session_pb2.WorkerInfo(**info))
        for session in before:
            if session.outbox is not None:
                session.outbox.close()

    def forget_sessions(self) -> None:
        """As a restart does."""
        self._hub = LinkHub(10.0, 10_000, lambda session: None)
        self.session = None

    def _welcome(self, resumed: bool, received: int) -> session_pb2.ConnectResponse:
        welcome = session_pb2.Welcome(resumed=resumed, received=received, worker=self.info)
        return session_pb2.ConnectResponse(epoch=self.epoch, welcome=welcome)

    def _on_command(self, session: Session, command: session_pb2.ConnectRequest) -> None:
        self.session = session
        (self.probes if _is_probe(command) else self.commands).append(command)
        self.on_command(command)
        self.begin(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _report(self) -> None:
        while True:
            if not self.silent:
                for session in self._hub.links:
                    session.send_latest(session_pb2.ConnectResponse(epoch=self.epoch, report=self.report))
            await asyncio.sleep(REPORT_S)


class FakePair:
    """A prefill and a decode worker that answer by a script, until `manual`: then the test speaks for them."""

    def __init__(self, prefill: FakeWorker, decode: FakeWorker, script: Script) -> None:
        self.prefill, self.decode = prefill, decode
        self.workers = (prefill, decode)
        self.script = script
        self.manual = False
        self.limits: list[int] = []  # of the next answers: decode falls silent about them at so many tokens
        prefill.on_command = self._on_prefill
        decode.on_command = self._on_start

    @property
    def addresses(self) -> str:
        """As a router's configuration names them."""
        return f"prefill@{self.prefill.endpoint},decode@{self.decode.endpoint}"

    def first_step(
        self,
        attempt_id: int,
        token_ids: list[int],
        ends: list[Any] | None = None,
        worker: FakeWorker | None = None,
        offset: int = 0,
        first_choice: int = 0,
    ) -> None:
        """The first token of every choice, from prefill unless told otherwise; 0 in `ends` is no end."""
        outputs = [
            session_pb2.SequenceOutput(
                attempt_id=attempt_id,
                choice=first_choice + index,
                offset=offset,
                token_ids=[token_id],
                end=ends[index] if ends else None,
            )
            for index, token_id in enumerate(token_ids)
        ]
        timings = session_pb2.PrefillTimings(queue_ms=0.1, chunk_ms=[0.2, 0.3], total_ms=0.6)
        first_step = session_pb2.FirstStep(attempt_id=attempt_id, outputs=outputs, timings=timings)
        (worker or self.prefill).say(first_step=first_step)

    def step(self, attempt_id: int, offset: int, token_ids: list[int], end: Any = 0, choice: int = 0) -> None:
        output = session_pb2.SequenceOutput(
            attempt_id=attempt_id, choice=choice, offset=offset, token_ids=token_ids, end=end
        )
        self.decode.say(step_outputs=session_pb2.StepOutputs(outputs=[output]))

    def landed(self, attempt_id: int) -> None:
        landed = session_pb2.Landed(
            attempt_id=attempt_id, bytes=4096, copy_ms=2.0, exposed_ms=0.5, admission_ms=0.1, first_step_ms=0.2,
            transport="shared_memory",
        )  # fmt: skip
        self.decode.say(landed=landed)

    def _on_prefill(self, command: session_pb2.ConnectRequest) -> None:
        if self.manual or command.WhichOneof("command") != "prefill":
            return
        self._compute_prompt(command.prefill, self.prefill)

    def _compute_prompt(self, command: Any, worker: FakeWorker) -> None:
        if isinstance(command, session_pb2.Prefill) and command.HasField("pooling"):
            pooled = [float(len(command.token_ids)), float(command.token_ids[-1]), 1.0]
            timings = session_pb2.PrefillTimings(chunk_ms=[0.2], total_ms=0.3)
            first_step = session_pb2.FirstStep(attempt_id=command.attempt_id, pooled=pooled, timings=timings)
            worker.say(first_step=first_step)
            return
        answers, begin = [self._answer(command, choice) for choice in _choices(command)], command.answered_tokens
        ends = [_end(answer, command.sampling) if len(answer) == begin + 1 else 0 for answer in answers]
        first = [answer[begin] for answer in answers]
        self.first_step(command.attempt_id, first, ends, worker, begin, command.first_choice)

    def _on_start(self, command: session_pb2.ConnectRequest) -> None:
        if self.manual or command.WhichOneof("command") != "start":
            return
        start, limit = command.start, self.limits.pop(0) if self.limits else None
        if start.prefill_endpoint and not self.prefill.has_prompt(start.attempt_id):
            self.decode.begin(self._answer_later(start, limit, self.decode.session))
        else:
            self._answer_start(start, limit)

    async def _answer_later(self, start: session_pb2.Start, limit: int | None, asking: Session | None) -> None:
        """A worker that reads KV never answers before the one that computes it has its command."""
        await self.prefill.prompt_comes(start.attempt_id)
        self.decode.session = asking  # of several routers
        self._answer_start(start, limit)

    def _answer_start(self, start: session_pb2.Start, limit: int | None) -> None:
        if start.prefill_endpoint:
            self.landed(start.attempt_id)
        else:
            self._compute_prompt(start, self.decode)
        first = start.answered_tokens
        for choice in _choices(start):
            answer = self._answer(start, choice)
            for offset in range(first + 1, len(answer) if limit is None else min(limit, len(answer))):
                end = _end(answer, start.sampling) if offset == len(answer) - 1 else 0
                repeats = offset == first + 1 and start.prefill_endpoint  # what came over
                begin = first if repeats else offset
                self.step(start.attempt_id, begin, answer[begin : offset + 1], end, choice)

    def _answer(self, command: Any, choice: int) -> list[int]:
        prompt = list(command.token_ids)[: len(command.token_ids) - command.answered_tokens]
        answer = self.script(prompt, choice)[: command.sampling.max_tokens]
        assert list(command.token_ids)[len(prompt) :] == answer[: command.answered_tokens]
        stops = [i for i, token_id in enumerate(answer) if token_id in command.sampling.stop_token_ids]
        return answer[: stops[0] + 1] if stops else answer


def _is_probe(command: session_pb2.ConnectRequest) -> bool:
    return PROBE_ID in (command.prefill.request_id, command.start.request_id)


def _choices(command: Any) -> range:
    return range(command.first_choice, command.first_choice + command.sampling.n)


def _end(answer: list[int], sampling: sampling_pb2.Sampling) -> int:
    stopped = answer[-1] in sampling.stop_token_ids
    return session_pb2.END_REASON_STOP if stopped else session_pb2.END_REASON_LENGTH


def worker_info(role: int, model_folder: str, **fields: Any) -> session_pb2.WorkerInfo:
    """A worker of a tiny model: 257 token ids, a context of 128, blocks of 4 tokens."""
    model = session_pb2.ModelInfo(
        name="tiny", path=model_folder, max_model_len=128, vocab_size=257, dtype="float32", block_size=4
    )
    defaults: dict[str, Any] = {
        "worker_id": session_pb2.Role.Name(role).removeprefix("ROLE_").lower() + "-0",
        "pid": os.getpid() + role,
        "fingerprint": b"f" * 32,
        "total_blocks": 400,
        "total_slots": 64 if role == session_pb2.ROLE_DECODE else 0,
        "pool_id": secrets.token_bytes(16),
    }
    return session_pb2.WorkerInfo(role=role, model=model, **(defaults | fields))  # type: ignore[arg-type]
