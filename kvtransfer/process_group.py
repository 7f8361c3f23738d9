"""Process group of torch.distributed for one pair of workers: rendezvous of its two ranks, and numbered messages.

Each pair has its own group, so that the death of one worker cannot block another pair. After the first failure both
workers drop the group, which closes the group's sockets and wakes the peer immediately.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Literal, Protocol, cast

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work

from baton.kvtransfer.transport import LinkBroken


class KeyValues(Protocol):
    """Key-value store in which two ranks find each other. Every wait is bounded. Raises: LinkBroken."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait until the key is set; return its value."""

    def wait(self, keys: Sequence[str], timeout_s: float) -> None: ...

    def check(self, keys: Sequence[str]) -> bool: ...

    def add(self, key: str, amount: int) -> int: ...

    def delete(self, key: str) -> bool: ...


class LocalKeyValues:
    """Key-value store in the memory of this process. Any thread may call it."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    @property
    def values(self) -> Mapping[str, bytes]:
        return self._values

    def close(self) -> None:
        """Close the store: pending waits fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        self.wait([key], timeout_s)
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        with self._changed:
            there = self._changed.wait_for(lambda: self._closed or self.check(keys), timeout_s)
            if self._closed or not there:
                raise LinkBroken(f"the other rank did not arrive within {timeout_s:g} s, or has closed")

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = b"%d" % total
            self._changed.notify_all()
            return total

    def delete(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None


class GroupStore(Store):
    """`KeyValues` as a store of torch.distributed: rank 0 keeps the values, rank 1 requests them over gRPC.

    Opens no socket, unlike TCPStore, which listens on every interface. Keep a reference to this store while the group
    lives, because threads of torch.distributed call it.
    """

    def __init__(self, values: KeyValues, timeout_s: float) -> None:
        super().__init__()
        self._values = values
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        self._values.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._values.get(key, self._timeout_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._values.wait(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        return self._values.check(keys)

    def add(self, key: str, amount: int) -> int:
        return self._values.add(key, amount)

    def delete_key(self, key: str) -> bool:
        return self._values.delete(key)


GroupBackend = Literal["nccl", "gloo"]
SOURCE, READER = 0, 1
POLL_S = 20e-6  # interval at which the GPU is polled


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Options of one rank of a process group. Only `backend` must be equal at both ranks."""

    backend: GroupBackend
    interface: str  # network interface to connect and listen on, for example eth0
    device: torch.device  # device of the messages
    timeout_s: float  # longest wait for a message of the other rank


class Backend(Protocol):
    """Methods of ProcessGroupGloo and ProcessGroupNCCL that this module calls, but torch's type stubs omit."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work: ...

    def abort(self) -> None: ...


Wait = Callable[[], None]
"""Function that waits until a message in flight has been sent or received: then its memory is not accessed any more.
Raises: LinkBroken, at the latest after the group's timeout.
"""


class ProcessGroup:
    """Link of numbered messages between two ranks, over gloo or NCCL.

    Only one thread of each rank may call it, but any thread may call `close`.
    """

    def __init__(self, store: Store, rank: int, options: GroupOptions) -> None:
        """Wait for the other rank and connect. Raises: LinkBroken, also if torch or the machine lacks the backend."""
        self._options = options
        self._store = store  # a reference, since torch calls the store while the group lives
        self._peer = SOURCE + READER - rank
        self._lock = threading.Lock()
        self._closed = False
        self._awaited: Future[None] | None = None
        self._waits: SimpleQueue[tuple[Work, Future[None]] | None] = SimpleQueue()
        self._works: dict[int, Work] = {}  # messages in flight, by sequence number; they keep the sockets open
        self._side_stream = torch.cuda.Stream(options.device) if options.device.type == "cuda" else None
        try:
            self._group: Backend | None = _OPEN[options.backend](store, rank, options)
        except (RuntimeError, ImportError, ValueError) as error:
            raise LinkBroken(f"{options.backend} on {options.interface}: {error}") from error
        if options.backend == "gloo":
            threading.Thread(target=_wait_in_turn, args=(self._waits, options), name="kv-wait", daemon=True).start()

    def send(self, message: torch.Tensor, sequence: int) -> Wait:
        return self._start(sequence, lambda group: group.send([message], self._peer, sequence))

    def receive(self, message: torch.Tensor, sequence: int) -> Wait:
        return self._start(sequence, lambda group: group.recv([message], self._peer, sequence))

    def stream(self) -> AbstractContextManager[object]:
        """Return the CUDA stream for work on messages. Sends and receives wait for earlier work on this stream."""
        return nullcontext() if self._side_stream is None else torch.cuda.stream(self._side_stream)

    def settle(self) -> None:
        """Wait until all work on `stream()` has finished. Raises: LinkBroken."""
        if self._side_stream is not None:
            done = self._side_stream.record_event()
            self._poll(done.query)

    def close(self) -> None:
        """Close the group. Any thread may call it; pending waits fail immediately."""
        with self._lock:
            self._closed = True
            if self._awaited is not None:
                self._awaited.cancel()
        self._waits.put(None)
        self._drop()

    def _drop(self) -> None:
        group, self._group = self._group, None
        self._works.clear()
        if group is not None and self._options.backend == "nccl":
            group.abort()  # wakes waiting threads; gloo wakes them when the last reference to the group is gone

    def _start(self, sequence: int, start: Callable[[Backend], Work]) -> Wait:
        group = self._group
        if group is None or self._closed:
            raise LinkBroken("the process group was closed")
        try:
            self._works[sequence] = start(group)
        except RuntimeError as error:
            raise LinkBroken(str(error)) from error
        return lambda: self._finish(sequence)

    def _finish(self, sequence: int) -> None:
        with self._lock:
            work = self._works.pop(sequence, None)
            if work is None or self._closed:
                raise LinkBroken("the process group was closed")
            awaited: Future[None] = Future()
            self._awaited = awaited
        try:
            if self._options.backend == "nccl":
                self._poll(work.is_completed)  # NCCL's wait() only orders streams, and does not block
                work.wait(timedelta(seconds=self._options.timeout_s))
            else:
                self._waits.put((work, awaited))
                awaited.result()
        except CancelledError as error:
            raise LinkBroken("the process group was closed") from error
        except RuntimeError as error:
            raise LinkBroken(str(error)) from error
        finally:
            self._awaited = None
            del work  # otherwise an exception's traceback would keep the group's sockets open

    def _poll(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._options.timeout_s
        while not done():
            if self._closed or time.monotonic() > deadline:
                raise LinkBroken(f"no message within {self._options.timeout_s:g} s, or the group was closed")
            time.sleep(POLL_S)


def _wait_in_turn(waits: "SimpleQueue[tuple[Work, Future[None]] | None]", options: GroupOptions) -> None:
    """Wait for gloo's sends and receives in order, on a thread of its own, so that callers can stop waiting.

    Gloo does not wake a receive whose message breaks off in the middle. The caller may then learn in another way that
    the peer is lost, and stop waiting. In this case this thread, the message's memory and the group's listening socket
    remain until the timeout.
    """
    while (entry := waits.get()) is not None:
        work, awaited = entry
        error: RuntimeError | None = None
        try:
            work.wait(timedelta(seconds=options.timeout_s))
        except RuntimeError as failure:
            error = failure.with_traceback(None)
        if awaited.set_running_or_notify_cancel():
            if error is None:
                awaited.set_result(None)
            else:
                awaited.set_exception(error)
        del entry, work, awaited  # they would keep the group's sockets open until the next message


def prepare_environment(interface: str, timeout_s: float, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the environment variables that NCCL and torch read when the first group is created. Call it once at start.

    Otherwise torch's watchdog would end this process when a peer is lost.
    """
    environment.update(
        {
            "NCCL_SOCKET_IFNAME": f"={interface}",  # "=": the exact name; NCCL would otherwise match prefixes
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "TORCH_NCCL_ENABLE_MONITORING": "0",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
            "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(max(1, round(timeout_s))),
        }
    )


def _gloo(store: Store, rank: int, options: GroupOptions) -> Backend:
    chosen = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    chosen._devices = [ProcessGroupGloo.create_device(interface=options.interface)]
    chosen._timeout = timedelta(seconds=options.timeout_s)
    return cast("Backend", ProcessGroupGloo(store, rank, 2, chosen))


def _nccl(store: Store, rank: int, options: GroupOptions) -> Backend:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # CPU builds of torch lack it

    chosen = ProcessGroupNCCL.Options()
    chosen.config.blocking = 0  # otherwise an absent peer blocks the caller forever
    chosen._timeout = timedelta(seconds=options.timeout_s)
    return cast("Backend", ProcessGroupNCCL(store, rank, 2, chosen))


_OPEN: dict[GroupBackend, Callable[[Store, int, GroupOptions], Backend]] = {"gloo": _gloo, "nccl": _nccl}
