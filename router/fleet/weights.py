"""Open requests by the weights or adapter that they use. Requests whose weights were replaced get a time limit."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton.process.errors import Aborted
from baton.process.registry.worker_record import version_of
from baton.router.types.worker import Adapter, ListedAdapter

End = Callable[[Aborted], None]


@dataclass(eq=False, slots=True)
class TrackedRequest:
    digest: str
    end: End
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class OpenRequests:
    """Open requests of one router. `on_change` is called when workers must keep other adapters or weights than before.

    `can_compute` returns whether any worker still has the adapter or, for None, the weights that it was started with.
    """

    on_change: Callable[[], None]
    can_compute: Callable[[Adapter | None], bool]
    in_force: ListedAdapter | None = None
    """List entry of the weights that replace those that workers were started with; None: they are not replaced."""
    _open: dict[str, set[TrackedRequest]] = field(default_factory=dict)  # requests by digest of weights or adapter
    _ends_at: dict[str, float] = field(default_factory=dict)  # deadline (loop.time()) by digest of replaced weights

    @property
    def weights(self) -> Adapter | None:
        """Weights that replace those that workers were started with; None: they are not replaced."""
        return None if self.in_force is None else self.in_force.adapter

    @property
    def digests(self) -> list[str]:
        return list(self._open)

    @contextmanager
    def using(self, adapter: Adapter | None, own_weights: str, end: End) -> Iterator[None]:
        """Register a request for the duration of the context. `adapter` None: it uses `own_weights`, the digest of the
        weights that workers were started with. `end`: called with the error if the grace of replaced weights expires.
        """
        digest = own_weights if adapter is None else adapter.digest
        request = TrackedRequest(digest, end)
        is_first = digest not in self._open
        self._open.setdefault(digest, set()).add(request)
        if self._is_replaced(digest):
            self._limit(request)
            if is_first:
                self.on_change()
        try:
            yield
        finally:
            if request.timer is not None:
                request.timer.cancel()
            self._open[digest].discard(request)
            if not self._open[digest]:
                del self._open[digest]
                if adapter not in (None, self.weights) or self._is_replaced(digest):  # workers keep current weights
                    self.on_change()

    def take(self, in_force: ListedAdapter | None) -> None:
        """Put weights in force. Open requests with other weights fail after the grace period of the new weights."""
        if in_force == self.in_force:
            return
        self.in_force = in_force
        if in_force is not None:
            self._ends_at.pop(in_force.adapter.digest, None)
            for request in self._open.get(in_force.adapter.digest, ()):
                if request.timer is not None:
                    request.timer.cancel()
                    request.timer = None
        for digest, requests in self._open.items():
            if self._is_replaced(digest):
                for request in requests:
                    self._limit(request)

    def gone(self, adapter: Adapter | None) -> Aborted | None:
        """Return the error for a request whose weights were replaced and are on no worker any more; otherwise None."""
        if self.weights is None or adapter == self.weights or self.can_compute(adapter):
            return None
        return _replaced("" if adapter is None else adapter.digest, "no worker has them any more; send it again")

    def _is_replaced(self, digest: str) -> bool:
        return self.in_force is not None and digest != self.in_force.adapter.digest

    def _limit(self, request: TrackedRequest) -> None:
        if request.timer is not None or self.in_force is None:
            return
        loop, grace_s = asyncio.get_running_loop(), self.in_force.grace_s
        ends_at = self._ends_at.setdefault(request.digest, loop.time() + grace_s)
        error = _replaced(request.digest, f"it did not finish within the grace of {grace_s:g} s; send it again")
        request.timer = loop.call_at(ends_at, request.end, error)


def _replaced(digest: str, why: str) -> Aborted:
    version = f", version {version_of(digest)}," if digest else ""
    return Aborted(f"the weights of this request{version} were replaced: {why}", "MODEL_REPLACED")
