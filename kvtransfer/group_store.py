"""The store of torch.distributed through which the two ranks of a group find each other, over our own connections.

TCPStore would listen on every interface. Ours opens no socket: rank 0 keeps the values, rank 1 asks it.
"""

import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Protocol

from torch._C._distributed_c10d import Store

from kvtransfer.errors import LinkBroken


class KeyValues(Protocol):
    """Every wait is bounded. Raises: LinkBroken."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits until the key is set."""

    def wait(self, keys: Sequence[str], timeout_s: float) -> None: ...

    def check(self, keys: Sequence[str]) -> bool: ...

    def add(self, key: str, amount: int) -> int: ...

    def delete(self, key: str) -> bool: ...


class LocalKeyValues:
    """The values themselves. Any thread."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    @property
    def values(self) -> Mapping[str, bytes]:
        return self._values

    def close(self) -> None:
        """Threads that wait in `get` end with an error."""
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
                raise LinkBroken(f"the other rank did not come within {timeout_s:g} s, or has gone")

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
    """The store that torch.distributed calls, from threads of its own. Keep a reference while the group lives."""

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
