"""Which workers exist, judged from successive listings by our own clock. Pure: time comes in."""

from collections.abc import Sequence

from service.worker_record import WorkerRecord


class MembershipView:
    """A worker is gone once successful listings have lacked it for `ttl_s`; failed listings remove no worker.

    A listing with a lower epoch lacks it too: of a zombie, or of a process whose epoch is from a clock that went back.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._records: dict[str, WorkerRecord] = {}
        self._missing_since: dict[str, float] = {}

    @property
    def workers(self) -> tuple[WorkerRecord, ...]:
        """In the order of worker ids."""
        return tuple(self._records[worker_id] for worker_id in sorted(self._records))

    def observe(self, listed: Sequence[WorkerRecord], now: float) -> bool:
        """Take in a successful listing; returns whether `workers` changed."""
        before = self.workers
        for record in listed:
            known = self._records.get(record.worker_id)
            # A registry that lost its data may receive an old epoch first: the higher one that we know stands.
            if known is None or (record.epoch or 0) >= (known.epoch or 0):
                self._records[record.worker_id] = record
        present = {record.worker_id for record in listed if self._records.get(record.worker_id) == record}
        self._forget_missing(present, now)
        return self.workers != before

    def lost_contact(self) -> None:
        """The registry did not answer: time without listings counts against no worker."""
        self._missing_since.clear()

    def _forget_missing(self, present: set[str], now: float) -> None:
        for worker_id in list(self._records):
            if worker_id in present:
                self._missing_since.pop(worker_id, None)
            elif now - self._missing_since.setdefault(worker_id, now) > self._ttl_s:
                del self._records[worker_id], self._missing_since[worker_id]
