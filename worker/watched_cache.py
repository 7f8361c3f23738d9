"""The engine's prefix cache as the source side of transfers reaches it, from an event loop."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from engine.pages import Watch

Owner = int | Watch
"""The owner of a transfer's blocks: the request whose pages are pinned, or the watch on blocks of the cache."""


class WatchedCache(Protocol):
    def watch(self, hashes: Sequence[bytes]) -> "Future[Watch]":
        """See `BlockPool.watch`. Raises, at once or by the future: EngineStopped."""

    def unwatch(self, watch: Watch) -> None: ...

    def distrust(self, blocks: Sequence[int]) -> None:
        """These blocks cannot be found again, nor can blocks that were computed from them."""


def is_overwritten(owner: Owner | None) -> bool:
    """Whether some of the blocks read were given away meanwhile; pinned blocks never are."""
    return isinstance(owner, Watch) and owner.broken
