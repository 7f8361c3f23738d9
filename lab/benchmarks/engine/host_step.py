"""Host time of a decode step: scheduler, step record, event loop and messages, with a forward that computes nothing.

A decode worker without a model runs in a process of its own. Its forward only takes a set time, in which the host may
prepare the next step and send tokens, as with a GPU. This process is its router. CPU time counts all threads of the
worker; the period of a step is compared with the forward's time.

    .venv/bin/python -m baton.lab.benchmarks.engine.host_step --sequences 256 --forward-ms 8 --json FILE
"""

import asyncio
import dataclasses
import secrets
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import torch

from baton.decode_worker.retained import RetainedBounds
from baton.decode_worker.service import DecodeService
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import ChunkResult, Plan, computed_token
from baton.engine.runner.engine import Engine
from baton.engine.runner.launched import NO_TOKENS, Launched
from baton.engine.runner.loop import EngineLoop
from baton.engine.scheduler.budget import StepBudget
from baton.engine.scheduler.scheduler import Scheduler
from baton.kvtransfer.description import POOL_ID_BYTES, PoolDescription, host_id
from baton.kvtransfer.puller import PullThread
from baton.lab.benchmarks.router.streams import cpu_s
from baton.lab.harness.processes import HOST, listens, our_program, running, split_cores
from baton.lab.report.result import SERVICE, judge_rounds, make_result, read_arguments, write_result
from baton.process.registry.redis_server import free_port
from baton.process.serving.grpc_options import INTERNAL_SERVER_OPTIONS
from baton.process.serving.server import keep_for_good, run
from baton.protos import sampling_pb2, session_pb2, session_pb2_grpc
from baton.router.fleet import wire as link_wire
from baton.worker.config import REPORT_PERIOD_S
from baton.worker.service import ServiceParts
from baton.worker.transfer.peers import Peers
from baton.worker.transfer.reader import TransferReader

BLOCK_TOKENS, BLOCKS, CONTEXT_TOKENS, VOCABULARY = 32, 1 << 15, 1 << 17, 1 << 15
PROMPT_TOKENS, ANSWER_TOKENS = 16, 1 << 16
FINGERPRINT = bytes(32)
ACKNOWLEDGE_EVERY = 64
SETTLE_S, READY_S = 1.0, 30.0
MOST_PERIOD = 1.03  # promised period of a step, as a multiple of the forward's time


class PacedRunner:
    """Runner whose device takes `forward_s` for each step, and computes one step after the other."""

    launches_ahead = True

    def __init__(self, forward_s: float) -> None:
        self._forward_s = forward_s
        self._free_s = 0.0  # time at which the device has finished the latest step

    def launch(self, plan: Plan, after: Launched | None = None) -> Launched:
        self._free_s = done_s = max(time.monotonic(), self._free_s) + self._forward_s

        def results() -> tuple[ChunkResult, ...]:
            time.sleep(max(0.0, done_s - time.monotonic()))
            return tuple([computed_token(chunk.start % VOCABULARY, -0.5) for chunk in plan.chunks])

        return Launched(NO_TOKENS, results)


async def serve_worker(port: int, forward_s: float, sequences: int) -> int:
    """Serve a decode worker until killed."""
    memory = torch.zeros(BLOCKS, dtype=torch.uint8)
    description = PoolDescription(FINGERPRINT, 1, BLOCKS, host_id(), secrets.token_bytes(POOL_ID_BYTES))
    reader = TransferReader(Peers(description, memory, PullThread(None), "grpc", READY_S))
    scheduler = Scheduler(BlockPool(BLOCKS), BLOCK_TOKENS, 2 * sequences, sequences, StepBudget())
    faults: list[BaseException] = []
    loop = EngineLoop(
        Engine(PacedRunner(forward_s), scheduler),
        lambda outcomes, step: service.on_outcomes(outcomes, step),
        faults.append,
    )
    model = session_pb2.ModelInfo(
        name="paced", max_model_len=CONTEXT_TOKENS, vocab_size=VOCABULARY, dtype="float32", block_size=BLOCK_TOKENS
    )
    info = session_pb2.WorkerInfo(
        worker_id="paced", role=session_pb2.ROLE_DECODE, pid=1, fingerprint=FINGERPRINT, model=model,
        total_blocks=BLOCKS, total_slots=sequences,
    )  # fmt: skip
    service = DecodeService(info, 1, 1.0, ServiceParts(loop), reader, RetainedBounds(1, 1))
    await loop.start()
    server = grpc.aio.server(options=INTERNAL_SERVER_OPTIONS)
    session_pb2_grpc.add_SessionServiceServicer_to_server(service, server)
    server.add_insecure_port(f"{HOST}:{port}")
    await server.start()
    keep_for_good()
    while not faults:
        await asyncio.sleep(REPORT_PERIOD_S)
        service.report()
    return 1


@dataclass(frozen=True, slots=True)
class HostStepFigures:
    """Figures of one round. Times are medians or means per step, in milliseconds."""

    sequences: int
    forward_ms: float
    steps: int
    period_ms: float
    cpu_ms: float  # CPU time of all threads of the worker

    @property
    def period_ratio(self) -> float:
        return self.period_ms / self.forward_ms if self.forward_ms else 0.0


async def measure(
    pid: int, port: int, sequences: int, forward_ms: float, tokens_together: int, seconds: float
) -> HostStepFigures:
    """Start the sequences on the worker, then measure it for `seconds`."""
    router = MeasuredLink(sequences)
    async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
        reading = asyncio.create_task(router.read(channel, tokens_together))
        try:
            async with asyncio.timeout(READY_S):
                await router.all_begun.wait()
            await asyncio.sleep(SETTLE_S)
            began_s, cpu, steps = time.monotonic(), cpu_s(pid), router.steps
            await asyncio.sleep(seconds)
            count = router.steps - steps
            took_s, spent_s = time.monotonic() - began_s, cpu_s(pid) - cpu
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
    return HostStepFigures(sequences, forward_ms, count, took_s / count * 1e3, spent_s / count * 1e3)


class MeasuredLink:
    """Router's side of one link, which starts sequences and counts steps by the worker's reports."""

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._begun = 0  # sequences with a first token
        self.all_begun = asyncio.Event()
        self.steps = 0  # steps of the worker, by its newest report

    async def read(self, channel: grpc.aio.Channel, tokens_together: int) -> None:
        call = session_pb2_grpc.SessionServiceStub(channel).Connect()
        await call.write(link_wire.hello(secrets.token_bytes(16), 0, 0).message)
        await call.read()
        for number in range(1, self._sequences + 1):
            sampling = sampling_pb2.Sampling(max_tokens=ANSWER_TOKENS, n=1, top_p=1.0)
            start = session_pb2.Start(
                attempt_id=number, token_ids=range(1, PROMPT_TOKENS + 1), sampling=sampling, time_left_ms=1 << 20,
                tokens_together=tokens_together,
            )  # fmt: skip
            await call.write(session_pb2.ConnectRequest(number=number, start=start))
        while isinstance(message := await call.read(), session_pb2.ConnectResponse):
            if message.HasField("report"):
                self.steps = message.report.steps
            self._begun += message.HasField("first_step")
            if self._begun == self._sequences:
                self.all_begun.set()
            if message.number and message.number % ACKNOWLEDGE_EVERY == 0:
                await call.write(session_pb2.ConnectRequest(acknowledged=message.number))


@asynccontextmanager
async def serving(folder: Path, forward_ms: float, sequences: int) -> AsyncIterator[tuple[int, int]]:
    """Run the worker on one core; yield its process id and port."""
    port = free_port()
    asked = ("baton.lab.benchmarks.engine.host_step", "--worker-port", port, "--forward-ms", forward_ms)
    program = our_program("worker", folder, *asked, "--sequences", sequences, cores=split_cores()[0])

    async with running([program], lambda: listens(f"{HOST}:{port}")) as it:
        yield it.pid, port


async def measure_rounds(
    sequences: int, forward_ms: float, together: int, seconds: float, rounds: int
) -> list[HostStepFigures]:
    found = []
    with TemporaryDirectory(prefix="baton-bench-") as name:
        for _ in range(rounds):
            async with serving(Path(name), forward_ms, sequences) as (pid, port):
                found.append(await measure(pid, port, sequences, forward_ms, together, seconds))
    return found


def main() -> int:
    arguments = read_arguments(
        __doc__, sequences=256, forward_ms=8.0, together=1, seconds=5.0, rounds=3,
        worker_port=(0, "serve a worker at this port instead; for this command's own use"),
    )  # fmt: skip
    if arguments.worker_port:
        forward_s = arguments.forward_ms / 1e3
        return run(serve_worker(arguments.worker_port, forward_s, arguments.sequences))
    asked = (arguments.sequences, arguments.forward_ms, arguments.together, arguments.seconds, arguments.rounds)
    found = asyncio.run(measure_rounds(*asked))
    for each in found:
        print(
            f"{each.sequences} sequences: {each.cpu_ms:.2f} ms of CPU a step, a step every {each.period_ms:.2f} ms, "
            f"{each.period_ratio:.3f} times the forward"
        )
    text = f"a step of {arguments.sequences} sequences takes at most {MOST_PERIOD} times the forward"
    verdict = judge_rounds(text, [each.period_ratio <= MOST_PERIOD for each in found])
    rounds = [{**dataclasses.asdict(each), "period_ratio": each.period_ratio} for each in found]
    write_result(arguments.json, make_result(SERVICE, rounds, verdict))
    return 0


if __name__ == "__main__":
    sys.exit(main())
