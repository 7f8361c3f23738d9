"""Whether structured output can be followed, found out in processes of their own, within bounds of time and memory."""

import asyncio
import hashlib
import json
import queue
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from baton.generation.structured.output import StructuredOutput
from baton.router.admission.queue import RETRY_AFTER_S
from baton.router.model.form_process import Setup
from baton.service.errors import InvalidArgument, ResourceExhausted, Unavailable
from baton.service.helper import HelperFailed, HelperNotStarted, HelperProcess, HelperSlow

REMEMBERED = 4096  # verdicts
PROCESSES = 2
LIMIT_S = 2.0  # for one form
MAX_WAITING = 64  # forms: the last of them waits LIMIT_S * MAX_WAITING / PROCESSES at most


class FormChecker:
    """Compiles forms for the served model's tokens, in processes that can be killed. Remembers its verdicts.

    To be closed.
    """

    def __init__(self, setup: Setup, processes: int = PROCESSES, limit_s: float = LIMIT_S) -> None:
        """`limit_s` is for one form, without the start of a process, which is put off until the first question."""
        self._memory_bytes = setup.memory_bytes
        self._limit_s = limit_s
        arguments = json.dumps(asdict(setup))
        self._processes = tuple(HelperProcess("baton.router.model.form_process", arguments) for _ in range(processes))
        self._idle: queue.SimpleQueue[HelperProcess] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(processes, "forms")
        self._waiting = 0
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self.checked = 0  # in a process

    async def check(self, asked: StructuredOutput) -> None:
        """Raises: InvalidArgument, ResourceExhausted, Unavailable."""
        fault = await self.fault(asked)
        if fault is not None:
            raise InvalidArgument(asked.field, fault)

    async def fault(self, asked: StructuredOutput) -> str | None:
        """The error in the form, if any. Raises: ResourceExhausted, Unavailable."""
        key = hashlib.sha256(f"{asked.kind.value}\n{asked.text}".encode(errors="surrogatepass")).digest()
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
            return self._verdicts[key]
        if self._waiting >= MAX_WAITING:
            message = f"{self._waiting} structured outputs are waiting to be compiled"
            raise ResourceExhausted(message, RETRY_AFTER_S, "too_many_structured_outputs")
        self._waiting += 1
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, asked)
        except HelperNotStarted as error:
            fault = error.fault or "the process that checks forms does not start"
            raise Unavailable(f"{asked.field}: {fault}", "NO_STRUCTURED_OUTPUT", RETRY_AFTER_S) from error
        finally:
            self._waiting -= 1
        self.checked += 1
        self._verdicts[key] = found
        if len(self._verdicts) > REMEMBERED:
            self._verdicts.popitem(last=False)
        return found

    def close(self) -> None:
        """Ends the processes; a check that is under way fails."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()

    def _ask(self, asked: StructuredOutput) -> str | None:
        """Blocks. Raises: HelperNotStarted."""
        process = self._idle.get()
        try:
            return process.ask([json.dumps([asked.kind.value, asked.text]).encode()], self._limit_s).decode() or None
        except HelperNotStarted:
            raise
        except HelperSlow:
            return f"takes more than {self._limit_s:g} s to compile"
        except HelperFailed:
            return f"takes more than {self._memory_bytes >> 20} MiB to compile"
        finally:
            self._idle.put(process)
