"""Redis through which routers of a test exchange their shares."""

from baton.process.registry.redis_registry import RegistryUnavailable


class SharedRedis:
    """Shares of routers by number. While `gone` is true, no exchange succeeds."""

    def __init__(self) -> None:
        self.shares: dict[int, bytes] = {}
        self.gone = False

    def of_router(self, number: int) -> "RouterShares":
        return RouterShares(self, number)


class RouterShares:
    def __init__(self, redis: SharedRedis, number: int) -> None:
        self._redis = redis
        self._number = number

    async def exchange(self, share: bytes) -> tuple[bytes, ...]:
        if self._redis.gone:
            raise RegistryUnavailable("it is gone")
        self._redis.shares[self._number] = share
        return tuple(each for number, each in self._redis.shares.items() if number != self._number)

    async def close(self) -> None:
        """Nothing is open."""
