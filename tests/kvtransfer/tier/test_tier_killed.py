"""A process that is killed while it writes: the next one has its blocks, its folder, and goes on."""

import subprocess
import sys
import time
from pathlib import Path

from tests.fixtures.tier_blocks import loaded, named_blocks, segment_files, store_in

WRITER = """
import sys
from pathlib import Path
from tests.fixtures.tier_blocks import named_blocks, store_in
store = store_in(Path(sys.argv[1]), blocks=3000)
for number in range(0, 10**9, 3):
    store.put(named_blocks(range(number, number + 3)))
    print(number + 3, flush=True)
"""
WAIT_S = 60.0


def killed_writer(directory: Path, blocks: int) -> int:
    """How many blocks it had written for sure, more than `blocks`, when it was killed."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(directory)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        written, deadline = 0, time.monotonic() + WAIT_S
        while written < blocks:
            assert time.monotonic() < deadline, "it writes nothing"
            written = int(writer.stdout.readline())
        writer.kill()
        rest = writer.stdout.read().split()  # of what it said until then, the last line may be cut off
        return int(rest[-2]) if len(rest) > 1 else written


def test_blocks_survive_kill_9_of_the_process_that_writes(tmp_path: Path) -> None:
    written = killed_writer(tmp_path, blocks=300)
    store = store_in(tmp_path, blocks=3000)
    newest = range(max(0, written - 60), written)
    assert loaded(store, newest) == len(newest)
    assert store.counters.corrupt_blocks == 0
    files = len(segment_files(tmp_path))
    store.put(named_blocks([10**9 + 1]))
    assert loaded(store, [10**9 + 1]) == 1
    assert len(segment_files(tmp_path)) <= files + 1
    store.close()
