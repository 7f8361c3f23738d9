"""Whether an answer can be held to the requested form: beside which other fields, and whether it compiles in bounds."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from router.refusals import RETRY_AFTER_S
from router.request import RequestedSampling
from service.errors import InvalidArgument, ResourceExhausted, Unavailable
from structured.check_process import Setup
from structured.checker import MEMORY_BYTES, Checker, CheckerBroken
from structured.output import FormRefused, StructuredOutput, check_form

PROCESSES = 2
LIMIT_S = 2.0  # for one form
MAX_WAITING = 64  # forms: the last of them waits LIMIT_S * MAX_WAITING / PROCESSES at most


def structured_output(sampling: RequestedSampling, stop_token_ids: Sequence[int]) -> StructuredOutput | None:
    """Checked as far as possible without compiling it. Pure. Raises: InvalidArgument."""
    asked = sampling.structured
    if asked is None:
        return None
    name = asked.kind.value
    for field, foreign in (
        ("ignore_eos", sampling.ignore_eos),
        ("beam_width", sampling.beam_width is not None),
        ("allowed_token_ids", bool(sampling.allowed_token_ids)),
    ):
        if foreign:
            raise InvalidArgument(f"sampling.{field}", f"does not go with {name}")
    if not stop_token_ids:
        raise InvalidArgument(asked.field, "structured output needs an end-of-sequence token, which this model lacks")
    try:
        check_form(asked)
    except FormRefused as refusal:
        raise InvalidArgument(asked.field, str(refusal)) from refusal
    return asked


class FormChecker:
    """Compiles forms for the served model's tokens, in processes that can be killed. To be closed."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: frozenset[int], limit_s: float = LIMIT_S) -> None:
        """Nothing is started before it is needed."""
        setup = Setup(str(folder.resolve()), vocab_size, tuple(sorted(eos_token_ids)), MEMORY_BYTES)
        self._checker = Checker(setup, PROCESSES, limit_s)
        self._threads = ThreadPoolExecutor(PROCESSES, "forms")
        self._waiting = 0

    async def check(self, asked: StructuredOutput) -> None:
        """Raises: InvalidArgument, ResourceExhausted, Unavailable."""
        if self._waiting >= MAX_WAITING and not self._checker.known(asked):
            message = f"{self._waiting} structured outputs are waiting to be compiled"
            raise ResourceExhausted(message, RETRY_AFTER_S, "too_many_structured_outputs")
        self._waiting += 1
        try:
            fault = await asyncio.get_running_loop().run_in_executor(self._threads, self._checker.check, asked)
        except CheckerBroken as error:
            raise Unavailable(f"{asked.field}: {error}", "NO_STRUCTURED_OUTPUT", RETRY_AFTER_S) from error
        finally:
            self._waiting -= 1
        if fault is not None:
            raise InvalidArgument(asked.field, fault)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._checker.close()
