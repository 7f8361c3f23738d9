"""The API keys of a process as they are now: read from their file again whenever it changes, or on SIGHUP."""

import asyncio
import logging
import signal
from collections.abc import Sequence
from pathlib import Path

from service.api_keys import ApiKey, KeyFormatError, KeyRing, parse_key_file

POLL_S = 1.0
_MAX_FILE_BYTES = 16 << 20

logger = logging.getLogger(__name__)


class KeyStore:
    """`ring` has the present keys. A file that went bad or away changes nothing: the earlier keys stay valid."""

    def __init__(self, file: Path | None, fixed: Sequence[ApiKey] = ()) -> None:
        """`fixed` keys hold beside those of the file. Raises: KeyFormatError, OSError."""
        self._file = file
        self._fixed = tuple(fixed)
        self._seen = self._stamp()
        self.ring = self._read()

    def reload(self) -> bool:
        """Whether the file could be read."""
        try:
            ring = self._read()
        except (KeyFormatError, OSError, UnicodeDecodeError) as error:
            logger.error("the API keys were not reloaded: %s", _told(error))
            return False
        self.ring = ring
        logger.info("%d API keys loaded", len(ring))
        return True

    def poll(self) -> None:
        """Reads the file again where it has changed."""
        try:
            stamp = self._stamp()
        except OSError as error:
            stamp = None
            if self._seen is not None:
                logger.error("the API keys were not reloaded: %s", _told(error))
        if stamp != self._seen:
            self._seen = stamp
            if stamp is not None:
                self.reload()

    async def run(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        try:
            while True:
                await asyncio.sleep(POLL_S)
                self.poll()
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    def _stamp(self) -> tuple[int, int, int] | None:
        """Changes with the file, also where another one takes its place. Raises: OSError."""
        if self._file is None:
            return None
        found = self._file.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> KeyRing:
        if self._file is None:
            return KeyRing(self._fixed)
        with self._file.open(encoding="utf-8") as file:
            text = file.read(_MAX_FILE_BYTES)
        return KeyRing((*self._fixed, *parse_key_file(text)))


def _told(error: Exception) -> str:
    """Without the content of the file."""
    return "the file is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
