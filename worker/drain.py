"""How a worker stops taking work: it reports so first and takes requests that cross that report; then it refuses.
And which callers may change its role.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.protos import session_pb2

logger = logging.getLogger(__name__)
ChangeRole = Callable[[session_pb2.Role], None]

NOTICE_S = 0.3  # a report to every router, and the requests that they sent before it came


class DrainState:
    """Base of a worker's table of requests."""

    leaving = False  # reported as draining
    draining = False  # and new work is refused
    broken = False  # the engine is lost: an open request may be the reason, so other workers do not continue them
    _change_role: ChangeRole | None = None
    _worker: session_pb2.WorkerInfo  # as routers see it

    @property
    def hands_over(self) -> bool:
        """Whether requests that are open when the worker stops are left over by a drain."""
        return self.leaving and not self.broken

    def breaks(self, on_fault: Callable[[BaseException], None]) -> Callable[[BaseException], None]:
        """`on_fault`, of which this table takes note."""

        def noted(fault: BaseException) -> None:
            self.broken = True
            on_fault(fault)

        return noted

    def offer_roles(self, roles: Sequence[session_pb2.Role], change_role: ChangeRole) -> None:
        """Announces the roles that this process can take; `change_role` is called when a router wants another."""
        self._worker.roles.extend(roles)
        self._change_role = change_role

    def on_change_role(self, wanted: session_pb2.Role) -> None:
        if self._change_role is None:
            logger.warning("a router asked for a change of role, which this worker does not support")
        else:
            self._change_role(wanted)


class Draining(Protocol):
    """A worker's table of requests. `leaving` is reported; with `draining` new work is refused."""

    leaving: bool
    draining: bool

    @property
    def busy(self) -> bool: ...
    def report(self) -> None: ...


class Drain:
    """One service's drain; it may be called off. On the event loop."""

    def __init__(self, service: Draining) -> None:
        self._service = service
        self._notice: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """Something is open, or may still arrive."""
        service = self._service
        return service.busy or (service.leaving and not service.draining)

    def begin(self) -> None:
        if not self._service.leaving:
            self._service.leaving = True
            self._service.report()
            self._notice = asyncio.get_running_loop().call_later(NOTICE_S, self._refuse)

    def call_off(self) -> None:
        if self._notice is not None:
            self._notice.cancel()
        self._service.leaving = self._service.draining = False
        self._service.report()

    def _refuse(self) -> None:
        self._service.draining = True
