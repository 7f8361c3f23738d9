"""The streams of this router that can be resumed. Of each request the newest stream lives: an older one, here or at
another router, is ended.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from router import journal_wire
from router.journal import Entry, Journal, Record, journal_key
from router.received import Received
from router.request import PreparedRequest
from router.resuming import ResumeRequest, Resumption
from router.served_model import ChosenModel
from service.registry import RegistryUnavailable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Beginning:
    """The request of a stream and its tenant; for a resumed one, where it continues and its record in the journal."""

    request: PreparedRequest
    chosen: ChosenModel
    tenant: str
    resume_token: str
    resumption: Resumption | None = None
    record: Record | None = None

    @property
    def key(self) -> str:
        return journal_key(self.tenant, self.request.valid.request_id, self.resume_token)

    @property
    def choices(self) -> int:
        """Streams whose ends are still to be reported."""
        return self.request.valid.n - (len(self.resumption.received.finished) if self.resumption is not None else 0)


class Streams:
    """`announce` tells other routers that a stream of one of them, by its number there, continues here."""

    def __init__(self, router_id: bytes, journal: Journal | None, announce: Callable[[bytes, int], None]) -> None:
        self._router_id = router_id
        self._journal = journal
        self._announce = announce
        self._numbers = itertools.count(1)
        self._lives: dict[int, asyncio.Timeout] = {}  # by number: the timeout that ends it
        self._newest: dict[str, int] = {}  # by key
        self.resumed = 0
        """Streams that were resumed here, since the start."""

    async def find(self, asked: ResumeRequest, block_tokens: int) -> Record | None:
        """The record of a stream of that caller."""
        if self._journal is None:
            return None
        key = journal_key(asked.tenant, asked.request_id, asked.resume_token)
        living = self._journal.find(key)
        if living is not None:
            return living
        try:
            data = await self._journal.read(key)
        except RegistryUnavailable as error:
            logger.info("the journal cannot be read to resume a stream: %s", error)
            return None
        return journal_wire.from_bytes(data, asked.tenant, block_tokens) if data is not None else None

    def resumption(self, received: Received, record: Record | None) -> Resumption:
        """An answer is not adopted where its stream lives here: its workers forget it when that one ends."""
        if record is None or (record.stream in self._lives and record.router_id == self._router_id):
            return Resumption(received)
        return Resumption(received, record.router_id, record.places)

    @contextmanager
    def open(self, beginning: Beginning, life: asyncio.Timeout | None, deadline_s: float) -> Iterator[Entry | None]:
        """While it lasts, `life` expires where a newer one begins. Without `life` it is none that can be resumed."""
        if life is None:
            yield None
            return
        key, record, number = beginning.key, beginning.record, next(self._numbers)
        self.end(self._newest.get(key))
        if record is not None and record.router_id != self._router_id:
            self._announce(record.router_id, record.stream)
        self.resumed += beginning.resumption is not None
        self._lives[number], self._newest[key] = life, number
        entry = self._open_entry(beginning, number, deadline_s)
        try:
            yield entry
        finally:
            self._lives.pop(number, None)
            if self._newest.get(key) == number:
                del self._newest[key]
            if entry is not None:
                entry.end()

    def _open_entry(self, beginning: Beginning, number: int, deadline_s: float) -> Entry | None:
        if self._journal is None:
            return None
        seize = beginning.resumption is not None
        model = beginning.chosen.name
        return self._journal.open(beginning.key, number, beginning.request, model, deadline_s, seize)

    def end(self, number: int | None) -> None:
        """A newer stream of the same request lives, here or elsewhere. One that has ended already is left alone."""
        life = self._lives.pop(number, None) if number is not None else None
        if life is not None:
            life.reschedule(asyncio.get_running_loop().time())
