"""Servers that compute nothing and send tokens at a set pace: workers for a measured router, and bare servers.

`-m baton.lab.benchmarks.router.worker FOLDER PREFILL_PORT DECODE_PORT INTERVAL_MS` runs a prefill and a decode worker
in one process. They send first tokens immediately. Then each step generates one token of every sequence, and sends one
message to each router. `/baton.bench.Worker/Marks` returns the times of the steps since the latest request as JSON, in
monotonic nanoseconds.

`-m baton.lab.benchmarks.router.worker floor PORT INTERVAL_MS` runs the bare gRPC server. It sends messages of the size
of a delta to each stream; a message begins with its creation time, in monotonic nanoseconds. `http-floor` instead of
`floor` runs the bare HTTP server, which writes the same chunk to all connections that have sent anything.
"""

import asyncio
import itertools
import json
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import grpc

from baton.process.links.connection import serve_connection
from baton.process.links.hub import LinkHub, RouterLink
from baton.process.serving.grpc_options import INTERNAL_SERVER_OPTIONS, SERVER_OPTIONS
from baton.process.serving.server import run
from baton.protos import report_pb2, session_pb2, session_pb2_grpc
from baton.worker.config import REPORT_PERIOD_S
from baton.worker.wire import send_report

BLOCK_TOKENS, BLOCKS, SLOTS, CONTEXT_TOKENS, VOCABULARY = 32, 1 << 20, 1 << 14, 1 << 17, 259
FIRST_LETTER = 3 + ord("a") - ord("!")  # the tiny checkpoint has three special tokens, then one per byte from "!" on
MARKS_METHOD = "/baton.bench.Worker/Marks"
FLOOR_METHOD = "/baton.bench.Floor/Stream"
TIME_BYTES = 8
MESSAGE_BYTES = 16  # size of a delta with one token

Session = RouterLink[session_pb2.ConnectResponse]


@dataclass(slots=True)
class ZeroSequence:
    attempt_id: int
    made: int  # number of sent tokens
    tokens: int  # number of tokens after which the sequence ends
    answer: Sequence[int] = ()  # tokens of the answer; empty: letters
    together: int = 1  # number of tokens that are sent together
    waiting: int = 0  # number of generated tokens that are not sent yet

    def output(self) -> session_pb2.SequenceOutput:
        """Return the message with the next token and all that wait."""
        offset, count, answer = self.made, self.waiting + 1, self.answer
        self.made, self.waiting = offset + count, 0
        token_ids = answer[offset : self.made] or [FIRST_LETTER + each % 26 for each in range(offset, self.made)]
        reason = session_pb2.END_REASON_STOP if answer else session_pb2.END_REASON_LENGTH
        end = reason if self.made == self.tokens else None
        return session_pb2.SequenceOutput(attempt_id=self.attempt_id, offset=offset, token_ids=token_ids, end=end)

    def waits(self) -> bool:
        """Return whether the next token waits to be sent with later ones, as a decode worker decides it."""
        made = self.made + self.waiting + 1
        if self.made < 2 or made == self.tokens or self.waiting + 1 >= self.together:
            return False
        self.waiting += 1
        return True


def step_outputs(outputs: Sequence[session_pb2.SequenceOutput], made_us: int) -> session_pb2.StepOutputs:
    """Return the message of a step, with single tokens as columns, as a decode worker sends them."""
    single = [each for each in outputs if len(each.token_ids) == 1 and not each.end]
    return session_pb2.StepOutputs(
        outputs=[each for each in outputs if len(each.token_ids) > 1 or each.end],
        made_us=made_us,
        attempt_ids=[each.attempt_id for each in single],
        choices=[each.choice for each in single],
        offsets=[each.offset for each in single],
        token_ids=[each.token_ids[0] for each in single],
    )


class ZeroWorker(session_pb2_grpc.SessionServiceServicer):
    """Worker that computes nothing and sends tokens at a set pace."""

    def __init__(self, role: "session_pb2.Role", folder: str, name: str = "", epoch: int = 1) -> None:
        self.info = worker_info(role, folder, name or f"zero-{role}")
        self._epoch = epoch
        self._hub: LinkHub[session_pb2.ConnectResponse] = LinkHub(1.0, 1 << 20, self._forget)
        self._running: dict[bytes, dict[int, ZeroSequence]] = {}  # by router id, then by attempt id
        self.marks: deque[int] = deque(maxlen=1 << 16)

    async def Connect(
        self, request_iterator: AsyncIterator[session_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[session_pb2.ConnectResponse]:
        connection = serve_connection(self._hub, self._epoch, request_iterator, self._welcome, self._on_command)
        async for message in connection:
            yield message

    def step(self) -> None:
        """Generate one token of every sequence."""
        for session in self._hub.links:
            sequences = self._running.get(session.router_id)
            if not sequences:
                continue
            outputs = [each.output() for each in sequences.values() if not each.waits()]
            step = step_outputs(outputs, time.monotonic_ns() // 1000)
            for attempt_id in [each.attempt_id for each in sequences.values() if each.made == each.tokens]:
                del sequences[attempt_id]
            self.marks.append(time.monotonic_ns())
            if outputs:
                self._say(session, step_outputs=step)

    def report(self) -> None:
        for session in self._hub.links:
            send_report(session, self._epoch, self._report())

    def _report(self) -> report_pb2.Report:
        pages = report_pb2.PageCounts(total=BLOCKS, free=BLOCKS)
        return report_pb2.Report(limit_blocks=BLOCKS, limit_slots=self.info.total_slots, pages=pages)

    def _welcome(self, resumed: bool, received: int) -> session_pb2.ConnectResponse:
        welcome = session_pb2.Welcome(resumed=resumed, received=received, worker=self.info)
        return session_pb2.ConnectResponse(epoch=self._epoch, welcome=welcome)

    def _on_command(self, session: Session, command: session_pb2.ConnectRequest) -> None:
        match command.WhichOneof("command"):
            case "prefill":
                self._first_step(session, command.prefill)
            case "start":
                start = command.start
                sequence = self._begun(start)
                if start.prefill_endpoint:
                    landed = session_pb2.Landed(attempt_id=start.attempt_id, transport="none")
                    self._say(session, landed=landed)
                    sequence.waiting = 1  # the first token, too, in case the prefill worker ends before it sends it
                else:
                    self._first_step(session, start)
                    sequence.made += 1
                if start.sampling.max_tokens > start.answered_tokens + 1:
                    self.marks.clear()
                    self._running.setdefault(session.router_id, {})[start.attempt_id] = sequence
            case "cancel":
                self._running.get(session.router_id, {}).pop(command.cancel.attempt_id, None)

    def _first_step(self, session: Session, command: Any) -> None:
        output = self._begun(command).output()
        timings = session_pb2.PrefillTimings(chunk_ms=[0.0])
        self._say(
            session, first_step=session_pb2.FirstStep(attempt_id=command.attempt_id, outputs=[output], timings=timings)
        )

    def _begun(self, command: Any) -> ZeroSequence:
        """Return the sequence for a command, with the tokens of earlier attempts only."""
        together = command.tokens_together if isinstance(command, session_pb2.Start) else 1
        return ZeroSequence(command.attempt_id, command.answered_tokens, command.sampling.max_tokens, together=together)

    def _say(self, session: Session, **event: Any) -> None:
        session.send(session_pb2.ConnectResponse(epoch=self._epoch, **event))

    def _forget(self, session: Session) -> None:
        self._running.pop(session.router_id, None)


def worker_info(role: "session_pb2.Role", folder: str, name: str) -> session_pb2.WorkerInfo:
    model = session_pb2.ModelInfo(
        name="zero", path=folder, max_model_len=CONTEXT_TOKENS, vocab_size=VOCABULARY, dtype="float32",
        block_size=BLOCK_TOKENS,
    )  # fmt: skip
    slots = SLOTS if role == session_pb2.ROLE_DECODE else 0
    return session_pb2.WorkerInfo(
        worker_id=name, role=role, pid=os.getpid(), fingerprint=bytes(32), model=model, total_blocks=BLOCKS,
        total_slots=slots,
    )  # fmt: skip


async def serve_workers(workers: Sequence[ZeroWorker], ports: tuple[int, int], interval_s: float) -> int:
    """Serve a prefill and a decode worker until killed."""
    decode = workers[1]

    async def marks(request: bytes, context: Any) -> bytes:
        return json.dumps(list(decode.marks)).encode()

    servers = []
    for worker, port in zip(workers, ports, strict=True):
        server = grpc.aio.server(options=INTERNAL_SERVER_OPTIONS)
        session_pb2_grpc.add_SessionServiceServicer_to_server(worker, server)
        service, method = MARKS_METHOD.strip("/").split("/")
        handlers: Any = {method: grpc.unary_unary_rpc_method_handler(marks)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        servers.append(server)
    begun_s, reported_s = time.monotonic(), 0.0
    for step in itertools.count(1):
        decode.step()
        now = time.monotonic()
        if now - reported_s > REPORT_PERIOD_S:
            reported_s = now
            for worker in workers:
                worker.report()
        due_s = begun_s + step * interval_s
        if due_s < now:  # late: missed steps are not made up for
            begun_s += now - due_s
        await asyncio.sleep(max(0.0, due_s - now))
    return 0


class Floor:
    """Bare server. All streams wait for the same ticks, as a router's streams wait for the steps of its workers."""

    def __init__(self) -> None:
        self._tick: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def tick(self) -> None:
        done, self._tick = self._tick, asyncio.get_running_loop().create_future()
        done.set_result(time.monotonic_ns().to_bytes(TIME_BYTES, "little").ljust(MESSAGE_BYTES, b"\0"))

    async def stream(self, request: bytes, context: Any) -> None:
        """Send the requested number of messages."""
        for _ in range(int(request)):
            await context.write(await asyncio.shield(self._tick))


async def serve_floor(port: int, interval_s: float) -> int:
    """Serve the bare server until killed."""
    floor = Floor()
    service, method = FLOOR_METHOD.strip("/").split("/")
    handler: Any = grpc.unary_stream_rpc_method_handler(floor.stream)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    begun_s = time.monotonic()
    for tick in itertools.count(1):
        await asyncio.sleep(max(0.0, begun_s + tick * interval_s - time.monotonic()))
        floor.tick()
    return 0


_EVENT = b'data: {%s"choices":[{"index":0,"text":"a"}]}\n\n' % (b" " * 170)  # as many bytes as a token's event


class HttpFloor(asyncio.Protocol):
    """Connection of the bare HTTP server."""

    open: ClassVar[set[asyncio.Transport]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._transport not in self.open:
            self._transport.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            self.open.add(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open.discard(self._transport)


async def serve_http_floor(port: int, interval_s: float) -> int:
    """Serve the bare HTTP server until killed."""
    await asyncio.get_running_loop().create_server(HttpFloor, "127.0.0.1", port)
    began_s, chunk = time.monotonic(), b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
    for tick in itertools.count(1):
        await asyncio.sleep(max(0.0, began_s + tick * interval_s - time.monotonic()))
        for transport in HttpFloor.open:
            transport.write(chunk)
    return 0


FLOORS = {"floor": serve_floor, "http-floor": serve_http_floor}

if __name__ == "__main__":
    if sys.argv[1] in FLOORS:
        sys.exit(run(FLOORS[sys.argv[1]](int(sys.argv[2]), float(sys.argv[3]) / 1e3)))
    both = [ZeroWorker(role, sys.argv[1]) for role in (session_pb2.ROLE_PREFILL, session_pb2.ROLE_DECODE)]
    sys.exit(run(serve_workers(both, (int(sys.argv[2]), int(sys.argv[3])), float(sys.argv[4]) / 1e3)))
