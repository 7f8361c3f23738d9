"""A process that gets SIGTERM before it serves ends at once, also as the first process of a container."""

import re
import signal
import subprocess
import sys

import pytest

from tests.fixtures.tools import ROOT

LOADING = """
import threading
from baton.service.serving.early_end import end_on_sigterm
end_on_sigterm()
threading.Thread(target=threading.Event().wait, args=(60,)).start()  # as a model that loads
print("loading", flush=True)
threading.Event().wait(60)
"""
PROCESSES = ("prefill_worker", "decode_worker", "worker", "router", "gateway")


def test_sigterm_ends_a_process_by_a_handler_of_its_own() -> None:
    """A default would end this one too, but not process 1: the exit code shows which of the two it was."""
    with subprocess.Popen([sys.executable, "-c", LOADING], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 128 + signal.SIGTERM


@pytest.mark.parametrize("name", PROCESSES)
def test_a_process_listens_before_it_imports_what_takes_long(name: str) -> None:
    text = (ROOT / name / "__main__.py").read_text()
    early, *late = re.findall(r"^\s*from (baton\.\S+) import", text, re.MULTILINE)
    assert early == "baton.service.serving.early_end" and late
    assert text.index("end_on_sigterm()") < text.index(late[0])
