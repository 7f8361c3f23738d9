"""Streamed answers in an event loop (`AsyncLLM`). The engine runs on its own thread."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Unpack

from baton.engine.offline.answer import LlmAnswer, RequestOutput
from baton.engine.offline.core import OfflineEngine, deliver
from baton.engine.offline.engine_args import EngineArgs, EngineOptions
from baton.engine.offline.lora import NO_ADAPTER, ChosenAdapter, LoRARequest
from baton.engine.offline.params import SamplingParams
from baton.engine.offline.prompts import PromptType
from baton.engine.runner.step_records import StepTiming
from baton.engine.runner.thread import EngineStopped, EngineThread
from baton.engine.runner.thread_preparation import thread_preparation
from baton.engine.scheduler.sequences import SchedulerOutcome

STOP_TIMEOUT_S = 30.0


@dataclass(slots=True)
class AnswerStream:
    """Streamed request: its caller iterates over the answer in the event loop."""

    number: int  # id of the request in the engine
    answer: LlmAnswer
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class AsyncLLM:
    """Model on one device, with streamed answers. Call all methods except `shutdown` in one event loop."""

    def __init__(self, model: str, **options: Unpack[EngineOptions]) -> None:
        """Load the model; EngineArgs lists the options. Raises: ValueError, ModelError."""
        self._engine = OfflineEngine(EngineArgs(model=model, **options))
        self._tokenizer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._streams: dict[str, AnswerStream] = {}
        self._names = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fault: BaseException | None = None
        engine = self._engine
        prepare = thread_preparation(None, engine.device, engine.runner, then=engine.warm_up_drafts)
        self._thread = EngineThread(self._engine, self._on_step, self._on_fault, lambda: None, prepare)
        self._thread.start()

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the accumulated answer each time it grows, until it finishes. Closing the iterator aborts the request.

        Raises: ValueError, ModelError; EngineStopped if the engine failed or was shut down.
        """
        self._loop = asyncio.get_running_loop()
        [read] = await self._loop.run_in_executor(self._tokenizer, self._engine.reader.read, [prompt])
        adapter = NO_ADAPTER if lora_request is None else await self._adapter(self._loop, lora_request)
        name = str(next(self._names)) if request_id is None else request_id
        if name in self._streams:
            raise ValueError(f"request_id {name!r} is in use by an unfinished request; choose another")
        request = self._engine.request(read, sampling_params, adapter)
        answer = LlmAnswer(name, read, sampling_params, self._engine.reader.decoder, streams=True)
        stream = self._streams[name] = AnswerStream(request.request_id, answer)
        try:
            await asyncio.wrap_future(self._thread.call(self._engine.add, request))
            while True:
                await stream.changed.wait()
                stream.changed.clear()
                if self._fault is not None:
                    raise EngineStopped("the engine has stopped") from self._fault
                output = answer.output()
                yield output
                if output.finished:
                    return
        finally:
            self._streams.pop(name, None)
            if not answer.finished:
                self._thread.post(self._engine.scheduler.abort, request.request_id)

    async def abort(self, request_id: str) -> None:
        """Abort a request; its iterator yields the answer so far with finish_reason "abort". Ignore unknown ids."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._thread.post(self._engine.scheduler.abort, stream.number)
            stream.answer.give_up()
            stream.changed.set()

    def shutdown(self) -> bool:
        """Stop the engine after its current step and return whether it stopped. Open iterators raise EngineStopped."""
        self._to_loop(self._end, EngineStopped("shut down"))
        self._tokenizer.shutdown(wait=False, cancel_futures=True)
        ended = self._thread.stop(STOP_TIMEOUT_S)
        self._engine.close()
        return ended

    async def _adapter(self, loop: asyncio.AbstractEventLoop, lora: LoRARequest) -> ChosenAdapter:
        """Read an adapter on the tokenizer's thread, so that running answers continue; then add it to the model."""
        read = await loop.run_in_executor(self._tokenizer, self._engine.read_adapter, lora)
        return await asyncio.wrap_future(self._thread.call(self._engine.add_adapter, read))

    def _on_step(self, outcomes: Sequence[SchedulerOutcome], timing: StepTiming) -> None:
        self._to_loop(self._deliver, outcomes)

    def _on_fault(self, fault: BaseException) -> None:
        self._to_loop(self._end, fault)

    def _deliver(self, outcomes: Sequence[SchedulerOutcome]) -> None:
        by_number = {stream.number: stream for stream in self._streams.values()}
        answers = {number: stream.answer for number, stream in by_number.items()}
        for number in deliver(answers, outcomes, self._stop_choice):
            by_number[number].changed.set()

    def _stop_choice(self, number: int, choice: int) -> None:
        self._thread.post(self._engine.scheduler.stop_choice, number, choice)

    def _end(self, fault: BaseException) -> None:
        self._fault = fault
        for stream in self._streams.values():
            stream.changed.set()

    def _to_loop(self, function: Callable[..., None], argument: object) -> None:
        """Call a function in the event loop, from any thread; do nothing if the loop is closed."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, argument)
