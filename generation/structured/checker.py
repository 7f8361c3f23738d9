"""Whether a form can be followed, found out in processes of their own, within bounds of time and memory."""

import contextlib
import hashlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict

from baton import child_environment
from baton.generation.structured.check_process import Setup
from baton.generation.structured.output import StructuredOutput

READY_S = 60.0  # of a process that reads a large tokenizer on a busy machine
STOP_S = 1.0
MEMORY_BYTES = 1 << 30
REMEMBERED = 4096  # verdicts
LINE_BYTES = 1 << 16


class CheckerBroken(RuntimeError):
    """The process that checks does not work; there is no verdict on the form."""


class CheckProcess:
    """One process, which lives until a form has killed it. One thread at a time."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._popen: subprocess.Popen[bytes] | None = None

    def check(self, output: StructuredOutput, limit_s: float) -> str | None:
        """The error in the form, if any. Raises: CheckerBroken."""
        popen = self._popen or self._start()
        line = json.dumps({"kind": output.kind.value, "text": output.text}).encode() + b"\n"
        try:
            return self._ask(popen, line, limit_s)
        except TimeoutError:
            self.close()
            return f"takes more than {limit_s:g} s to compile"
        except (OSError, EOFError):
            self.close()
            return f"takes more than {self._setup.memory_bytes >> 20} MiB to compile"

    def close(self) -> None:
        popen, self._popen = self._popen, None
        if popen is None:
            return
        popen.kill()
        popen.wait(STOP_S)
        for pipe in (popen.stdin, popen.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # of unread bytes
                    pipe.close()

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-P", "-m", "baton.generation.structured.check_process"]
        self._popen = popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            start_new_session=True,
        )
        try:
            fault = self._ask(popen, self._setup.line(), READY_S)
        except (TimeoutError, OSError, EOFError) as error:
            self.close()
            raise CheckerBroken("the process that checks forms does not start") from error
        if fault is not None:
            self.close()
            raise CheckerBroken(fault)
        return popen

    @staticmethod
    def _ask(popen: "subprocess.Popen[bytes]", line: bytes, limit_s: float) -> str | None:
        """Raises: TimeoutError, EOFError, OSError."""
        if popen.stdin is None or popen.stdout is None:
            raise EOFError
        popen.stdin.write(line)
        popen.stdin.flush()
        deadline, answer = time.monotonic() + limit_s, b""
        while not answer.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([popen.stdout], [], [], left_s)[0]:
                raise TimeoutError
            part = os.read(popen.stdout.fileno(), LINE_BYTES)
            if not part:
                raise EOFError
            answer += part
        fault: str | None = json.loads(answer)["error"]
        return fault


class Checker:
    """Remembers its verdicts. Any thread may ask; each of its processes is asked by one at a time."""

    def __init__(self, setup: Setup, processes: int, limit_s: float) -> None:
        """`limit_s` is for one form, without the start of a process, which is put off until the first question."""
        self._limit_s = limit_s
        self._processes = tuple(CheckProcess(setup) for _ in range(processes))
        self._idle: queue.SimpleQueue[CheckProcess] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._lock = threading.Lock()
        self.checked = 0  # in a process

    def known(self, output: StructuredOutput) -> bool:
        with self._lock:
            return _key(output) in self._verdicts

    def check(self, output: StructuredOutput) -> str | None:
        """The error in the form, if any. Blocks. Raises: CheckerBroken."""
        key = _key(output)
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                return self._verdicts[key]
        process = self._idle.get()
        try:
            fault = process.check(output, self._limit_s)
        finally:
            self._idle.put(process)
        with self._lock:
            self.checked += 1
            self._verdicts[key] = fault
            if len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)
        return fault

    def close(self) -> None:
        """Ends the processes; a check that is under way fails."""
        for process in self._processes:
            process.close()


def _key(output: StructuredOutput) -> bytes:
    return hashlib.sha256(f"{output.kind.value}\n{output.text}".encode(errors="surrogatepass")).digest()
