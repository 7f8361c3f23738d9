"""Place of files that were converted once, and are converted again if they are missing."""

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return the folder of conversions of one kind, such as `gguf`. It may not exist."""
    own = os.environ.get("BATON_CACHE")
    if own:
        return Path(own) / name
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton" / name
