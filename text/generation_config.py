"""Content of a checkpoint's generation_config.json, which may be missing."""

import logging
from pathlib import Path
from typing import Any

from baton.text.host.files import FileRefused, NotJson, read_json

logger = logging.getLogger(__name__)


def read_generation_config(folder: Path, refusal: type[FileRefused]) -> dict[str, Any]:
    """Return the content of generation_config.json. As in transformers, a file that is not JSON counts as missing.

    Raises: `refusal` for other faults.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    try:
        return read_json(path, refusal, dict)
    except refusal as error:
        if not isinstance(error.__cause__, NotJson):
            raise
        logger.warning("generation settings ignored: %s; the defaults apply, as in transformers", error)
        return {}
