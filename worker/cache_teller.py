"""Reports this worker's prefix cache to every connected router, over its session. Protobuf stops here."""

from engine.cache_journal import CacheChanges
from protos import cache_pb2, report_pb2, session_pb2
from service.session_hub import RouterSession, SessionHub
from worker.cache_log import CacheLog


class CacheTeller:
    """Of one epoch of a worker. Lives on the event loop."""

    def __init__(self, hub: SessionHub[session_pb2.ConnectResponse], epoch: int) -> None:
        self._hub = hub
        self._epoch = epoch
        self._log = CacheLog()

    def on_changes(self, changes: CacheChanges) -> None:
        """A step's changes of the cache. To be called before the step's tokens are sent."""
        for each in self._log.record(changes):
            events = cache_pb2.CacheEvents(
                sequence=each.sequence, stored=b"".join(each.stored), evicted=b"".join(each.evicted)
            )
            for session in self._hub.sessions:  # a message each: it takes the session's own acknowledgement
                session.mention(session_pb2.ConnectResponse(epoch=self._epoch, cache_events=events))

    def send_snapshot(self, session: RouterSession[session_pb2.ConnectResponse]) -> None:
        """All of it, in parts, for one router that asked."""
        for part in self._log.snapshot():
            snapshot = cache_pb2.CacheSnapshot(
                sequence=part.sequence, part=part.part, parts=part.parts, hashes=b"".join(part.hashes)
            )
            session.mention(session_pb2.ConnectResponse(epoch=self._epoch, cache_snapshot=snapshot))

    @property
    def sum(self) -> report_pb2.CacheSum:
        log = self._log
        return report_pb2.CacheSum(sequence=log.sequence, digest=log.digest, blocks=log.blocks)
