"""Check of requested structured output: a trial compilation in helper processes with limits of time and memory.

A *form* is the JSON schema, regular expression or grammar that a request demands of its answer.
"""

import hashlib
import json
from collections import OrderedDict
from dataclasses import asdict

from baton.process.errors import InvalidArgument, ResourceExhausted, Unavailable
from baton.process.helper import Failure, Helper, HelperFailed, HelperNotStarted
from baton.router.admission.queue import RETRY_AFTER_S
from baton.router.model.form_process import Setup
from baton.router.model.turns import Turns
from baton.text.structured.output import StructuredOutput

MODULE = "baton.router.model.form_process"
REMEMBERED = 4096  # maximum number of remembered verdicts
PROCESSES = 2
WALL_S = 20.0  # maximum wall time of checking one form; CPU time is limited separately
MAX_WAITING = 64  # maximum number of forms being checked or waiting for their check


class FormChecker:
    """Checks forms against the served model's vocabulary and remembers the verdicts. Call `close` at the end.

    A form that exceeds the limits of CPU time or memory is rejected. A timeout on a busy machine is not remembered as
    a verdict: the client may retry.
    """

    def __init__(self, setup: Setup, processes: int = PROCESSES, wall_s: float = WALL_S) -> None:
        """Create a checker. `wall_s`: maximum wall time of one check, not counting the first start of a process."""
        self._setup = setup
        self._helper = Helper(MODULE, json.dumps(asdict(setup)), processes=processes, limit_s=wall_s)
        self._turns = Turns(processes)
        self._waiting = 0
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self.checked = 0  # number of forms checked in a process, not from memory

    async def check(self, asked: StructuredOutput, tenant: str = "") -> None:
        """Check a form. Raises: InvalidArgument if it is rejected, ResourceExhausted, Unavailable."""
        fault = await self.fault(asked, tenant)
        if fault is not None:
            raise InvalidArgument(asked.field, fault)

    async def fault(self, asked: StructuredOutput, tenant: str = "") -> str | None:
        """Return why the form is rejected; None if it is valid. Raises: ResourceExhausted, Unavailable."""
        key = hashlib.sha256(f"{asked.kind.value}\n{asked.text}".encode(errors="surrogatepass")).digest()
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
            return self._verdicts[key]
        if self._waiting >= MAX_WAITING:
            message = f"{self._waiting} structured outputs are waiting to be compiled, the maximum; retry"
            raise ResourceExhausted(message, RETRY_AFTER_S, "too_many_structured_outputs")
        self._waiting += 1
        try:
            async with self._turns.turn(tenant, 1):
                found = await self._ask(asked)
        except HelperNotStarted as error:
            fault = error.fault or "the process that compiles structured output does not start"
            raise Unavailable(f"{asked.field}: {fault}", "NO_STRUCTURED_OUTPUT", RETRY_AFTER_S) from error
        except HelperFailed as error:
            message = f"{asked.field}: timed out after {self._helper.limit_s:g} s of compilation; retry"
            raise Unavailable(message, "STRUCTURED_OUTPUT_NOT_CHECKED", RETRY_AFTER_S) from error
        finally:
            self._waiting -= 1
        self.checked += 1
        self._verdicts[key] = found
        if len(self._verdicts) > REMEMBERED:
            self._verdicts.popitem(last=False)
        return found

    def close(self) -> None:
        """Stop the helper processes; running checks fail."""
        self._helper.close()

    async def _ask(self, asked: StructuredOutput) -> str | None:
        """Check a form in a helper process. Raises: HelperFailed for failures that the form did not cause."""
        try:
            return (await self._helper.ask([json.dumps([asked.kind.value, asked.text]).encode()])).decode() or None
        except HelperFailed as error:
            if not error.failure.is_of_question:
                raise
            return self._too_costly(error.failure)

    def _too_costly(self, failure: Failure) -> str:
        if failure is Failure.CPU:
            return f"takes more than {self._setup.cpu_s:g} s of CPU time to compile"
        if failure is Failure.MEMORY:
            return f"takes more than {self._setup.memory_bytes >> 20} MiB to compile"
        return "crashes its compiler"
