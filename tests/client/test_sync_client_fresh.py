"""The blocking client is what its generator makes of the asyncio one."""

from pathlib import Path

from baton.client import sync_client
from baton.client.generate import sync_source


def test_sync_client_is_fresh() -> None:
    assert Path(sync_client.__file__).read_text() == sync_source(), "run `.venv/bin/python client/generate.py`"
