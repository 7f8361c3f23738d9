"""Life of every process: bind, start, serve, drain on a signal, stop.

bind all listeners -> process.start(running) -> health SERVING when the process reports it
SIGTERM, SIGINT or running.stop(): health NOT_SERVING -> process.drain() within grace_s -> process.stop()
                                   -> servers stop -> exit code 0
A shared port is bound by running.join(), when the process can serve, and closed before the drain: until then and from
then on, the kernel gives connections to the other processes that listen on it.
second signal: stop without waiting, exit code 1
SIGHUP: reload; like SIGTERM if the terminal was closed (signals.py)
"""

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import grpc

from baton.process.affinity import CoresUnavailable
from baton.process.config import ConfigError
from baton.process.open_files import raise_limit
from baton.process.security.proofs import ProofCheck
from baton.process.security.tls import InternalTls, TlsError, TlsFiles
from baton.process.serving.addresses import Address, ListenError, check_free, host_and_port
from baton.process.serving.exit_codes import ExitCode
from baton.process.serving.grpc_options import SERVER_OPTIONS, sharing_port
from baton.process.serving.health import SERVICE_NAME, Health
from baton.process.serving.interceptors import Authorise, AuthorizationInterceptor, CallInterceptor
from baton.process.serving.loop_errors import report_loop_error
from baton.process.serving.signals import handle_hangup
from baton.process.serving.watchdog import BEATS, Watchdog

GRACE_S = 30.0
STALL_S = 30.0  # maximum time without progress
_STOP_S = 2.0  # maximum wait for open calls after the drain
YOUNG_OBJECTS = 10_000  # new objects after which the garbage collector looks at them

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listener:
    """Description of one gRPC server on one address. Port 0: any free port."""

    host: str
    port: int
    register: Callable[[grpc.aio.Server], None]  # adds the servicers to the server
    service_names: tuple[str, ...]  # full service names, for health and reflection
    reflection: bool = False
    authorise: Authorise | None = None  # decides which calls are allowed; None: all
    tls: TlsFiles | InternalTls | None = None
    options: tuple[tuple[str, int], ...] = SERVER_OPTIONS
    option: str = "--port"  # option that sets the address, for error messages
    proofs: ProofCheck | None = None  # check of the cluster secret; None: not required
    shared: bool = False  # other processes listen on the port, too: this one from `Running.join` until it drains


class Running:
    """State of a running process, with methods to stop and reload it."""

    def __init__(
        self,
        ports: tuple[int, ...],
        health: Health,
        stall_s: float = STALL_S,
        join: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self._join = join
        self.ports = ports
        """Bound ports, in the order of the listeners."""
        self.health = health
        self.watchdog = Watchdog(stall_s)
        self._beats = 0  # iterations of the event loop
        self.exit_code = 0
        self.reloads: list[Callable[[], None]] = []
        """Functions called on SIGHUP. Certificates are reloaded when their files change."""
        self.may_end_at_once = False
        """True while the process loads in threads that cannot be stopped and use what `Process.stop` would close: a
        signal then ends the process immediately.
        """
        self.stopping = asyncio.Event()
        self.forced = asyncio.Event()

    def stop(self, exit_code: int = 0) -> None:
        """Drain and stop, as after SIGTERM. `exit_code`: not 0 after a failure (worker fenced, engine failed)."""
        self.exit_code = max(self.exit_code, exit_code)
        self.stopping.set()

    async def join(self) -> None:
        """Begin to listen on shared ports; later calls do nothing. Raises: ListenError."""
        joining, self._join = self._join, None
        if joining is not None:
            await joining()

    async def beat(self) -> None:
        """Show the watchdog that the event loop makes progress, until cancelled."""
        self.watchdog.watch("event loop", lambda: self._beats)
        while True:
            self._beats += 1
            await asyncio.sleep(self.watchdog.bound_s / BEATS)

    def reload(self) -> None:
        logger.info("SIGHUP: %s", "reloading API keys" if self.reloads else "nothing to reload")
        for each in self.reloads:
            each()

    def on_signal(self, name: str) -> None:
        if self.may_end_at_once:
            logger.info("%s: exiting immediately, nothing is served yet", name)
            os._exit(self.exit_code)
        if self.stopping.is_set():
            logger.warning("second %s: stopping without waiting for requests", name)
            self.exit_code = 1
            self.forced.set()
        else:
            logger.info("%s: draining", name)
            self.stop()


class Process(Protocol):
    """Interface of a process that `serve` runs."""

    @property
    def listeners(self) -> Sequence[Listener]: ...

    async def start(self, running: Running) -> None:
        """Start the process; return when it is started. The call is cancelled if the process must stop earlier.

        Ports are bound before the call. Health is NOT_SERVING until the process sets `running.health`.
        """

    async def drain(self) -> None:
        """Refuse new work; return when accepted work has finished. `serve` calls this after `start`, and cancels it at
        the end of the grace period.
        """

    async def stop(self) -> None:
        """Release everything. Called once, also after a failed start()."""


async def serve(process: Process, grace_s: float = GRACE_S, stall_s: float = STALL_S, run_id: str = "") -> int:
    """Run a process until it stops; return its exit code. Raises: ListenError, TlsError, and the exceptions of start().

    After its start, the process exits if a part of it makes no progress for `stall_s`: see watchdog.py.
    """
    asyncio.get_running_loop().set_exception_handler(report_loop_error)
    listeners = process.listeners
    health = Health((name for listener in listeners for name in listener.service_names), run_id)
    servers = [_server(listener, health) for listener in listeners]
    pairs = list(zip(servers, listeners, strict=True))
    shared = [pair for pair in pairs if pair[1].shared]
    running = Running(tuple(_bound_port(*pair) for pair in pairs), health, stall_s, partial(_join, shared))
    beating: asyncio.Task[None] | None = None
    leaving: list[asyncio.Task[None]] = []
    await health.set_serving(False)
    with _signals(running):
        try:
            for server, listener in pairs:
                if not listener.shared:
                    await server.start()
            started = await _until(running.stopping, process.start(running))
            keep_for_good()
            beating = asyncio.create_task(running.beat(), name="heartbeat")
            running.watchdog.start()
            await running.stopping.wait()
            await health.drain()
            leaving += [asyncio.create_task(server.stop(grace_s + _STOP_S)) for server, _ in shared]
            if started and not await _until(running.forced, process.drain(), grace_s):
                logger.warning("drain not finished after %g s; stopping with open requests", grace_s)
        finally:
            await process.stop()
            grace = 0.0 if running.forced.is_set() else _STOP_S
            await asyncio.gather(*leaving, *(server.stop(grace) for server in servers))
            running.watchdog.close()
            if beating is not None:
                beating.cancel()
    return running.exit_code


def keep_for_good() -> None:
    """Exclude all existing objects from garbage collection: scanning them blocks every thread for 0.1 s.

    Collect young objects less often than by default: most of those that a step creates are freed with the next one.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run `main` on uvloop if installed; return the exit code. Configuration errors are logged in one line.

    Raises the limit of open files to the system's maximum.
    """
    raise_limit()
    try:
        return _run_loop(main)
    except ListenError as error:
        logger.critical("%s", error)
        return ExitCode.CANNOT_LISTEN
    except (ConfigError, CoresUnavailable, TlsError) as error:
        logger.critical("%s", error)
        return ExitCode.WRONG_CONFIGURATION
    except MemoryError:
        logger.critical("out of host memory; the process exits", exc_info=True)
        return ExitCode.OUT_OF_MEMORY


def _run_loop(main: Coroutine[Any, Any, int]) -> int:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return int(uvloop.run(main))


def _server(listener: Listener, health: Health) -> grpc.aio.Server:
    interceptors: list[grpc.aio.ServerInterceptor] = [CallInterceptor(listener.proofs)]
    if listener.authorise is not None:
        interceptors.append(AuthorizationInterceptor(listener.authorise))
    options = sharing_port(listener.options) if listener.shared else listener.options
    server = grpc.aio.server(interceptors=interceptors, options=options)
    listener.register(server)
    health.register(server)
    if listener.reflection:
        from grpc_reflection.v1alpha import reflection  # workers need no reflection package

        names = (*listener.service_names, SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    return server


async def _join(shared: Sequence[tuple[grpc.aio.Server, Listener]]) -> None:
    """Begin to listen on shared ports. Raises: ListenError."""
    for server, listener in shared:
        _bind(server, listener)
        await server.start()


def _bound_port(server: grpc.aio.Server, listener: Listener) -> int:
    """Bind the listener's port, unless it is shared, and return it. Raises: ListenError."""
    if not listener.shared:
        return _bind(server, listener)
    check_free(Address(listener.option, listener.host, listener.port), shared=True)
    return listener.port


def _bind(server: grpc.aio.Server, listener: Listener) -> int:
    check_free(Address(listener.option, listener.host, listener.port), listener.shared)
    address = host_and_port(listener.host, listener.port)
    try:
        if listener.tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, listener.tls.grpc_credentials())
    except RuntimeError as error:
        raise ListenError(f"cannot listen on {address}: {error}") from error
    if port == 0:
        raise ListenError(f"cannot listen on {address}")
    if listener.proofs is not None:
        listener.proofs.port = port
    return port


@contextmanager
def _signals(running: Running) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    handlers = {number: partial(running.on_signal, number.name) for number in (signal.SIGTERM, signal.SIGINT)}
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    handle_hangup(partial(running.on_signal, "SIGHUP, the terminal is closed"), running.reload)
    try:
        yield
    finally:
        for number in (*handlers, signal.SIGHUP):
            loop.remove_signal_handler(number)


async def _until(event: asyncio.Event, work: Coroutine[Any, Any, None], timeout_s: float | None = None) -> bool:
    """Run `work` until it completes, or cancel it once `event` is set or `timeout_s` is over. Return whether it
    completed; raise its exception.
    """
    working = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({working, waiting}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
